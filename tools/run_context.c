/*
 * A recorded context.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_context.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 1 << 24 };

/* What loading looks at. */
typedef struct source {
    const char *subcommand;
    const char *path;
    const char *name; /* of the case */
    const json_t *scalars;
    const reader *file;
    int code;
} source;

/* Says what is wrong, once. */
__attribute__((format(printf, 2, 3))) static void refuse(source *s, const char *format, ...)
{
    char text[512];
    va_list arguments;
    if (s->code != TOOL_OK)
        return;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    s->code = tool_fail(TOOL_BAD_FILE, s->subcommand, "%s: %s", s->path, text);
}

static void copy_printable(const char *from, char *to, size_t capacity)
{
    size_t i = 0;
    for (; from[i] && i + 1 < capacity; i++)
        to[i] = from[i] >= ' ' && from[i] <= '~' ? from[i] : '?';
    to[i] = '\0';
}

/* ---- Scalars ------------------------------------------------------------------------------------ */

static int64_t take_integer(source *s, const char *name, int64_t low, int64_t high)
{
    const json_t *value = json_object_get(s->scalars, name);
    int64_t number = json_integer_value(value);
    if (!json_is_integer(value))
        refuse(s, "the context has no whole number \"%s\"", name);
    else if (number < low || number > high)
        refuse(s, "%s is %" PRId64 "; %" PRId64 " to %" PRId64 " is possible", name, number, low, high);
    else
        return number;
    return low;
}

static float take_scale(source *s)
{
    const json_t *value = json_object_get(s->scalars, "scale");
    float scale = (float)json_number_value(value);
    if (!json_is_number(value) || !isfinite(scale))
        refuse(s, "the context has no finite number \"scale\"");
    return scale;
}

/* ---- Tensors ------------------------------------------------------------------------------------ */

static void describe(const csa_tensor *t, char *text, size_t capacity)
{
    int used = snprintf(text, capacity, "%s [", reader_dtype_name(t->dtype));
    for (int32_t i = 0; i < t->ndim && used >= 0 && (size_t)used < capacity; i++)
        used += snprintf(text + used, capacity - (size_t)used, "%s%" PRId64, i ? ", " : "", t->shape[i]);
    if (used >= 0 && (size_t)used < capacity)
        snprintf(text + used, capacity - (size_t)used, "]");
}

static bool same_shape(const csa_tensor *a, const csa_tensor *b)
{
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof a->shape[0]) == 0;
}

static const reader_tensor *find(const source *s, const char *name)
{
    size_t length = strlen(s->name) + strlen(name) + 2;
    char *whole = malloc(length);
    if (!whole)
        return NULL;
    snprintf(whole, length, "%s/%s", s->name, name);
    const reader_tensor *tensor = reader_find(s->file, whole);
    free(whole);
    return tensor;
}

/* The tensor's data, if it is what it should be. `want` has no data. */
static const void *take_tensor(source *s, const char *name, csa_tensor want)
{
    char is[128], should[128];
    const reader_tensor *tensor = find(s, name);
    if (!tensor) {
        refuse(s, "the context has no tensor %s", name);
        return NULL;
    }
    if (same_shape(&tensor->view, &want))
        return tensor->view.data;
    describe(&tensor->view, is, sizeof is);
    describe(&want, should, sizeof should);
    refuse(s, "%s is %s; the other sizes make it %s", name, is, should);
    return NULL;
}

/* Only a tensor tells how many index heads there are. */
static int64_t find_index_heads(source *s)
{
    const reader_tensor *tensor = find(s, "in.index_query");
    int64_t heads = tensor && tensor->view.ndim == 4 ? tensor->view.shape[2] : 0;
    if (!(heads >= 1 && heads <= 8) && heads != 16)
        refuse(s, "in.index_query must be [queries, groups, heads, 256] with 1 to 8 or 16 heads");
    return heads;
}

/* ---- The case ----------------------------------------------------------------------------------- */

static void load(source *s, run_context *c)
{
    c->tokens = take_integer(s, "tokens", 1, MAX_TOKENS);
    c->queries = take_integer(s, "queries", 1, c->tokens);
    c->groups = take_integer(s, "groups", 1, CSA_MAX_GROUPS);
    c->heads = take_integer(s, "heads", 1, CSA_MAX_HEADS);
    c->head_size = take_integer(s, "head_size", 1, CSA_HEAD_SIZE);
    c->scale = take_scale(s);
    c->index_heads = find_index_heads(s);
    if (s->code != TOOL_OK)
        return;
    int64_t rows = c->groups * c->heads, size = c->head_size;
    c->key = take_tensor(s, "in.key", csa_tensor_3d(NULL, CSA_BF16, c->tokens, c->groups, size));
    c->value = take_tensor(s, "in.value", csa_tensor_3d(NULL, CSA_BF16, c->tokens, c->groups, size));
    c->query = take_tensor(s, "in.query", csa_tensor_3d(NULL, CSA_BF16, c->queries, rows, size));
    c->index_key = take_tensor(s, "in.index_key", csa_tensor_2d(NULL, CSA_BF16, c->tokens, CSA_SUMMARY_SIZE));
    c->z = take_tensor(s, "in.z", csa_tensor_2d(NULL, CSA_BF16, c->tokens, CSA_SUMMARY_SIZE));
    c->index_query =
        take_tensor(s, "in.index_query",
                    csa_tensor_4d(NULL, CSA_E4M3, c->queries, c->groups, c->index_heads, CSA_SUMMARY_SIZE));
    c->index_weights =
        take_tensor(s, "in.index_weights", csa_tensor_3d(NULL, CSA_F32, c->queries, c->groups, c->index_heads));
    if (find(s, "out.dense"))
        c->dense = take_tensor(s, "out.dense", csa_tensor_3d(NULL, CSA_F32, c->queries, rows, size));
}

/* The scalars of a case if it is a context, else NULL: other cases are none of our business. */
static json_t *context_scalars(const json_t *text)
{
    char error[READER_TEXT];
    const char *string = json_string_value(text);
    json_t *scalars = string ? reader_json(string, json_string_length(text), error) : NULL;
    const char *op = json_string_value(json_object_get(scalars, "op"));
    if (op && strcmp(op, "context") == 0)
        return scalars;
    json_decref(scalars);
    return NULL;
}

/* `wanted` is the case's name, NULL for the first. */
static void find_case(source *s, const char *wanted, run_context *c)
{
    const json_t *metadata = reader_metadata(s->file);
    const char *format = json_string_value(json_object_get(metadata, "format"));
    if (!format || strcmp(format, "csa-capture/1") != 0) {
        refuse(s, "not a capture: the metadata has no \"format\": \"csa-capture/1\"");
        return;
    }
    json_t *text, *scalars = NULL;
    json_object_foreach ((json_t *)metadata, s->name, text) {
        scalars = wanted && strcmp(s->name, wanted) != 0 ? NULL : context_scalars(text);
        if (scalars)
            break;
    }
    if (!scalars) {
        refuse(s, "no case has the op \"context\"");
        return;
    }
    const char *origin = json_string_value(json_object_get(scalars, "source"));
    copy_printable(s->name, c->name, sizeof c->name);
    copy_printable(origin ? origin : "", c->source, sizeof c->source);
    s->scalars = scalars;
    load(s, c);
    json_decref(scalars);
}

int run_context_open(const char *path, const char *name, const char *subcommand, run_context *c)
{
    char text[READER_TEXT];
    *c = (run_context){0};
    if (!reader_open(path, &c->file, text))
        return tool_fail(TOOL_BAD_FILE, subcommand, "%s: %s", path, text);
    source s = {.subcommand = subcommand, .path = path, .file = &c->file, .code = TOOL_OK};
    find_case(&s, name, c);
    if (s.code != TOOL_OK)
        run_context_close(c);
    return s.code;
}

void run_context_close(run_context *c)
{
    reader_close(&c->file);
}

int64_t run_context_position(const run_context *c, int64_t query)
{
    return c->tokens - c->queries + query;
}

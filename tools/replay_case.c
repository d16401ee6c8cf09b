/*
 * csa replay: scalars, tensors, memory and calls of a case.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "replay.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256 }; /* as aligned as a workspace has to be */

struct replay_block {
    replay_block *next;
    unsigned char *memory; /* guard, bytes, guard */
    unsigned char *saved;  /* of the bytes, while a call is timed */
    size_t bytes;
};

void replay_fault(replay_case *c, int code, const char *subject, const char *format, ...)
{
    if (!replay_ok(c))
        return;
    char text[READER_TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    replay_result error = {.verdict = REPLAY_ERROR, .seconds = -1};
    snprintf(error.note, sizeof error.note, "%.180s", text);
    replay_report(c, subject, error);
    const char *subcommand = c->run->subcommand != NULL ? c->run->subcommand : "replay";
    c->code = tool_fail(code, subcommand, "%s: case %.200s: %s: %s", c->path, c->what->name, subject, text);
}

/* ---- Scalars ------------------------------------------------------------------------------------ */

int64_t replay_integer(replay_case *c, const char *name, int64_t low, int64_t high)
{
    const json_t *value = json_object_get(c->what->scalars, name);
    if (!json_is_integer(value))
        replay_fault(c, TOOL_BAD_FILE, name, "the metadata have no such whole number");
    else if (json_integer_value(value) < low || json_integer_value(value) > high)
        replay_fault(c, TOOL_BAD_FILE, name, "%lld is not within %lld and %lld",
                     (long long)json_integer_value(value), (long long)low, (long long)high);
    else
        return json_integer_value(value);
    return low;
}

double replay_real(replay_case *c, const char *name)
{
    const json_t *value = json_object_get(c->what->scalars, name);
    if (!json_is_number(value))
        replay_fault(c, TOOL_BAD_FILE, name, "the metadata have no such number");
    return json_number_value(value);
}

bool replay_flag(replay_case *c, const char *name, bool otherwise)
{
    const json_t *value = json_object_get(c->what->scalars, name);
    if (value == NULL)
        return otherwise;
    if (!json_is_boolean(value))
        replay_fault(c, TOOL_BAD_FILE, name, "neither true nor false");
    return json_is_true(value);
}

csa_tensor replay_list(replay_case *c, const char *name, int64_t count)
{
    const json_t *list = json_object_get(c->what->scalars, name);
    if (!json_is_array(list) || (int64_t)json_array_size(list) != count)
        replay_fault(c, TOOL_BAD_FILE, name, "no list of %lld numbers", (long long)count);
    csa_tensor tensor = replay_output(c, CSA_I32, REPLAY_SHAPE(count));
    for (int64_t i = 0; replay_ok(c) && i < count; i++) {
        const json_t *item = json_array_get(list, (size_t)i);
        json_int_t value = json_integer_value(item);
        if (!json_is_integer(item) || value < INT32_MIN || value > INT32_MAX)
            replay_fault(c, TOOL_BAD_FILE, name, "entry %lld is no 32-bit number", (long long)i);
        ((int32_t *)tensor.data)[i] = (int32_t)value;
    }
    return tensor;
}

/* ---- Tensors of the file ------------------------------------------------------------------------ */

bool replay_has(const replay_case *c, const char *name)
{
    return capture_input(c->what, name) != NULL;
}

bool replay_recorded(const replay_case *c, const char *name)
{
    return capture_output(c->what, name) != NULL;
}

static void print_shape(char *text, size_t size, int32_t ndim, const int64_t *shape)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < ndim && used < size; i++) {
        const char *comma = i > 0 ? ", " : "";
        used += (size_t)(shape[i] == REPLAY_ANY
                             ? snprintf(text + used, size - used, "%sany", comma)
                             : snprintf(text + used, size - used, "%s%lld", comma, (long long)shape[i]));
    }
    if (used < size)
        snprintf(text + used, size - used, "]");
}

static csa_tensor expect(replay_case *c, const char *kind, const char *name, const reader_tensor *tensor,
                         csa_dtype dtype, int32_t ndim, const int64_t *shape)
{
    char subject[128], is[128], should[128];
    snprintf(subject, sizeof subject, "%s.%s", kind, name);
    if (tensor == NULL) {
        replay_fault(c, TOOL_BAD_FILE, subject, "the tensor is missing");
        return (csa_tensor){0};
    }
    const csa_tensor *view = &tensor->view;
    bool fits = view->dtype == dtype && view->ndim == ndim;
    for (int32_t i = 0; fits && i < ndim; i++)
        fits = shape[i] == REPLAY_ANY || shape[i] == view->shape[i];
    if (fits)
        return replay_ok(c) ? *view : (csa_tensor){0};
    print_shape(is, sizeof is, view->ndim, view->shape);
    print_shape(should, sizeof should, ndim, shape);
    replay_fault(c, TOOL_BAD_FILE, subject, "%s %s, where %s %s was expected", reader_dtype_name(view->dtype),
                 is, reader_dtype_name(dtype), should);
    return (csa_tensor){0};
}

csa_tensor replay_input(replay_case *c, const char *name, csa_dtype dtype, int32_t ndim, const int64_t *shape)
{
    return expect(c, "in", name, capture_input(c->what, name), dtype, ndim, shape);
}

csa_tensor replay_record(replay_case *c, const char *name, csa_dtype dtype, int32_t ndim, const int64_t *shape)
{
    return expect(c, "out", name, capture_output(c->what, name), dtype, ndim, shape);
}

int64_t replay_elements(const csa_tensor *tensor)
{
    int64_t elements = tensor->ndim > 0;
    for (int32_t i = 0; i < tensor->ndim; i++)
        elements *= tensor->shape[i];
    return elements;
}

csa_tensor replay_rows(csa_tensor tensor, int64_t first, int64_t count)
{
    if (tensor.ndim == 0)
        return tensor;
    if (tensor.data != NULL)
        tensor.data = (char *)tensor.data + first * tensor.stride[0] * (int64_t)reader_element(tensor.dtype);
    tensor.shape[0] = count;
    return tensor;
}

/* ---- Memory ------------------------------------------------------------------------------------- */

/* Bytes of a tensor, SIZE_MAX if they do not fit. */
static size_t bytes_of(csa_dtype dtype, int32_t ndim, const int64_t *shape)
{
    size_t bytes = reader_element(dtype);
    for (int32_t i = 0; i < ndim; i++)
        if (shape[i] < 0 || __builtin_mul_overflow(bytes, (size_t)shape[i], &bytes))
            return SIZE_MAX;
    return bytes;
}

static replay_block *allocate(replay_case *c, size_t bytes)
{
    if (bytes > c->budget) {
        replay_fault(c, TOOL_BAD_FILE, "outputs",
                     "the sizes in this case ask for more memory than its file allows");
        return NULL;
    }
    size_t room = (bytes + (size_t)3 * GUARD - 1) / GUARD * GUARD;
    replay_block *block = calloc(1, sizeof *block);
    unsigned char *memory = aligned_alloc(GUARD, room);
    if (block == NULL || memory == NULL) {
        free(block);
        free(memory);
        replay_fault(c, TOOL_INTERNAL, "outputs", "out of memory");
        return NULL;
    }
    memset(memory, 0xFF, room);
    c->budget -= bytes;
    *block = (replay_block){c->blocks, memory, NULL, bytes};
    return c->blocks = block;
}

csa_tensor replay_output(replay_case *c, csa_dtype dtype, int32_t ndim, const int64_t *shape)
{
    csa_tensor tensor = {.dtype = dtype, .ndim = ndim};
    replay_block *block = replay_ok(c) ? allocate(c, bytes_of(dtype, ndim, shape)) : NULL;
    if (block == NULL)
        return (csa_tensor){0};
    tensor.data = block->memory + GUARD;
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        tensor.shape[i] = shape[i];
        tensor.stride[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
    return tensor;
}

csa_tensor replay_copy(replay_case *c, csa_tensor tensor)
{
    csa_tensor copy = replay_output(c, tensor.dtype, tensor.ndim, tensor.shape);
    size_t bytes = (size_t)replay_elements(&tensor) * reader_element(tensor.dtype);
    if (copy.data != NULL && bytes > 0)
        memcpy(copy.data, tensor.data, bytes);
    return copy;
}

static bool guards_hold(const replay_block *block)
{
    for (size_t i = 0; i < GUARD; i++)
        if (block->memory[i] != 0xFF || block->memory[GUARD + block->bytes + i] != 0xFF)
            return false;
    return true;
}

void replay_free(replay_case *c)
{
    bool hold = true;
    while (c->blocks != NULL) {
        replay_block *block = c->blocks;
        c->blocks = block->next;
        hold &= guards_hold(block);
        free(block->memory);
        free(block->saved);
        free(block);
    }
    free(c->times);
    free(c->checked);
    if (!hold)
        replay_report(c, "memory",
                      (replay_result){.verdict = REPLAY_FAIL, .note = "bytes outside an output changed"});
}

/* ---- Calls -------------------------------------------------------------------------------------- */

static void save_outputs(replay_case *c)
{
    for (replay_block *block = c->blocks; block != NULL; block = block->next) {
        block->saved = malloc(block->bytes + 1);
        if (block->saved == NULL)
            replay_fault(c, TOOL_INTERNAL, "outputs", "out of memory");
        else
            memcpy(block->saved, block->memory + GUARD, block->bytes);
    }
}

static void restore_outputs(replay_case *c)
{
    for (replay_block *block = c->blocks; block != NULL; block = block->next) {
        if (block->saved != NULL)
            memcpy(block->memory + GUARD, block->saved, block->bytes);
        free(block->saved);
        block->saved = NULL;
    }
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

bool replay_next(replay_case *c)
{
    int64_t runs = c->run->bench + 1;
    if (replay_ok(c) && c->calls == 1 && runs > 1)
        save_outputs(c);
    if (replay_ok(c) && c->calls < runs) {
        c->started = tool_seconds();
        return true;
    }
    if (c->calls > 1)
        restore_outputs(c);
    if (replay_ok(c)) {
        /* The first run warmed up, unless it is the only one. */
        double *times = c->times + (runs > 1);
        int64_t timed = runs - (runs > 1);
        qsort(times, (size_t)timed, sizeof *times, by_size);
        c->seconds = (times[(timed - 1) / 2] + times[timed / 2]) / 2;
    }
    c->calls = 0;
    return false;
}

void replay_ran(replay_case *c, const char *call, csa_status status)
{
    c->times[c->calls++] = tool_seconds() - c->started;
    if (status == CSA_OK)
        return;
    /* The library's text begins with the call's name. */
    char name[64], text[READER_TEXT];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(call, "("), call);
    size_t length = csa_last_error(text, sizeof text);
    const char *why = strncmp(text, name, strlen(name)) == 0 ? text + strlen(name) : text;
    why += strspn(why, ": ");
    int code = TOOL_INTERNAL;
    if (status == CSA_ERROR_UNSUPPORTED)
        code = TOOL_UNSUPPORTED;
    if (status == CSA_ERROR_ARGUMENT || status == CSA_ERROR_ID)
        code = TOOL_BAD_FILE;
    replay_fault(c, code, name, "%s", length > 0 ? why : "no further text");
}

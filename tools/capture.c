/*
 * Captures: the cases of a safetensors file.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "capture.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Always false. */
__attribute__((format(printf, 2, 3))) static bool refuse(char *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, READER_TEXT, format, arguments);
    va_end(arguments);
    return false;
}

static bool parse_case(const char *name, const json_t *json, capture_case *what, char *text)
{
    char why[READER_TEXT];
    what->name = name;
    what->scalars = reader_json(json_string_value(json), json_string_length(json), why);
    if (what->scalars == NULL)
        return refuse(text, "case %.100s: %.300s", name, why);
    what->op = json_string_value(json_object_get(what->scalars, "op"));
    return what->op != NULL || refuse(text, "case %.100s: its metadata are no JSON object with an op", name);
}

static bool parse_cases(capture *c, json_t *numbers, char *text)
{
    json_t *metadata = json_object_get(c->file.header, "__metadata__");
    const char *format = json_string_value(json_object_get(metadata, "format"));
    if (format == NULL || strcmp(format, "csa-capture/1") != 0)
        return refuse(text, "metadata: format is not csa-capture/1");
    c->cases = calloc(json_object_size(metadata), sizeof *c->cases);
    if (c->cases == NULL)
        return refuse(text, "out of memory");
    const char *name;
    json_t *json;
    json_object_foreach (metadata, name, json) {
        if (strcmp(name, "format") == 0)
            continue;
        json_object_set_new(numbers, name, json_integer((json_int_t)c->count));
        if (!parse_case(name, json, &c->cases[c->count++], text))
            return false;
    }
    return true;
}

/* CASE/in.NAME or CASE/out.NAME. */
static bool parse_name(const reader_tensor *tensor, const json_t *numbers, capture_tensor *parsed, char *text)
{
    const char *slash = strrchr(tensor->name, '/');
    const json_t *number =
        slash != NULL ? json_object_getn(numbers, tensor->name, (size_t)(slash - tensor->name)) : NULL;
    if (number == NULL)
        return refuse(text, "tensor %.100s: the metadata know no such case", tensor->name);
    const char *rest = slash + 1;
    parsed->output = strncmp(rest, "out.", 4) == 0;
    parsed->name = rest + (parsed->output ? 4 : 3);
    if ((!parsed->output && strncmp(rest, "in.", 3) != 0) || *parsed->name == '\0')
        return refuse(text, "tensor %.100s: neither an input nor an output", tensor->name);
    parsed->owner = (size_t)json_integer_value(number);
    parsed->tensor = tensor;
    return true;
}

static int by_owner(const void *a, const void *b)
{
    const capture_tensor *x = a, *y = b;
    if (x->owner != y->owner)
        return x->owner < y->owner ? -1 : 1;
    return x->output != y->output ? (x->output ? 1 : -1) : strcmp(x->name, y->name);
}

static bool parse_tensors(capture *c, const json_t *numbers, char *text)
{
    size_t count = c->file.count;
    c->tensors = calloc(count + 1, sizeof *c->tensors);
    if (c->tensors == NULL)
        return refuse(text, "out of memory");
    for (size_t i = 0; i < count; i++)
        if (!parse_name(&c->file.tensors[i], numbers, &c->tensors[i], text))
            return false;
    qsort(c->tensors, count, sizeof *c->tensors, by_owner);
    for (size_t i = 0; i < count; i++) {
        capture_case *what = &c->cases[c->tensors[i].owner];
        if (what->tensors == NULL)
            what->tensors = &c->tensors[i];
        *(c->tensors[i].output ? &what->outputs : &what->inputs) += 1;
    }
    return true;
}

bool capture_open(const char *path, capture *c, char text[READER_TEXT])
{
    memset(c, 0, sizeof *c);
    if (!reader_open(path, &c->file, text))
        return false;
    json_t *numbers = json_object();
    bool ok = parse_cases(c, numbers, text) && parse_tensors(c, numbers, text);
    json_decref(numbers);
    if (!ok)
        capture_close(c);
    return ok;
}

void capture_close(capture *c)
{
    for (size_t i = 0; i < c->count; i++)
        json_decref(c->cases[i].scalars);
    free(c->cases);
    free(c->tensors);
    reader_close(&c->file);
    memset(c, 0, sizeof *c);
}

static const reader_tensor *find(const capture_tensor *tensors, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(tensors[i].name, name) == 0)
            return tensors[i].tensor;
    return NULL;
}

const reader_tensor *capture_input(const capture_case *what, const char *name)
{
    return find(what->tensors, what->inputs, name);
}

const reader_tensor *capture_output(const capture_case *what, const char *name)
{
    return what->outputs > 0 ? find(what->tensors + what->inputs, what->outputs, name) : NULL;
}

bool capture_corner(const capture_case *what, const char *name)
{
    const json_t *corner = json_object_get(what->scalars, "corner");
    for (size_t i = 0; i < json_array_size(corner); i++) {
        const char *item = json_string_value(json_array_get(corner, i));
        if (item != NULL && strcmp(item, name) == 0)
            return true;
    }
    return false;
}

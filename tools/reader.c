/*
 * Safetensors: parsing and writing.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PREFIX = 8, ALIGNMENT = 64 };

static const struct {
    const char *name;
    csa_dtype dtype;
    size_t element;
} dtypes[] = {{"I32", CSA_I32, 4},   {"I64", CSA_I64, 8},   {"U8", CSA_U8, 1},       {"F32", CSA_F32, 4},
              {"BF16", CSA_BF16, 2}, {"BOOL", CSA_BOOL, 1}, {"F8_E4M3", CSA_E4M3, 1}};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

size_t reader_element(csa_dtype dtype)
{
    for (size_t i = 0; i < DTYPES; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].element;
    return 0;
}

const char *reader_dtype_name(csa_dtype dtype)
{
    for (size_t i = 0; i < DTYPES; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return "?";
}

/* Always false. Names in a file may hold anything, so what a terminal would obey is replaced. */
__attribute__((format(printf, 2, 3))) static bool refuse(char *text, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, READER_TEXT, format, arguments);
    va_end(arguments);
    for (char *c = text; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F)
            *c = '?';
    return false;
}

/* ---- JSON --------------------------------------------------------------------------------------- */

static bool too_deep(const char *json, size_t size)
{
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0; i < size; i++) {
        char c = json[i];
        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else if (!quoted && (c == '{' || c == '['))
            depth++;
        else if (!quoted && (c == '}' || c == ']'))
            depth--;
        if (depth > READER_MAX_DEPTH)
            return true;
    }
    return false;
}

json_t *reader_json(const char *json, size_t size, char text[READER_TEXT])
{
    if (too_deep(json, size)) {
        refuse(text, "JSON is nested deeper than %d levels", READER_MAX_DEPTH);
        return NULL;
    }
    json_error_t error;
    json_t *value = json_loadb(json, size, JSON_REJECT_DUPLICATES, &error);
    if (value == NULL)
        refuse(text, "JSON at byte %d: %s", error.position, error.text);
    return value;
}

/* ---- One tensor of the header ------------------------------------------------------------------- */

static bool parse_dtype(const json_t *entry, const char *name, reader_tensor *tensor, char *text)
{
    const char *word = json_string_value(json_object_get(entry, "dtype"));
    for (size_t i = 0; word != NULL && i < DTYPES; i++)
        if (strcmp(word, dtypes[i].name) == 0) {
            tensor->view.dtype = dtypes[i].dtype;
            return true;
        }
    return refuse(text, "tensor %.100s: dtype %.20s is not one of I32, I64, U8, F32, BF16, BOOL, F8_E4M3", name,
                  word != NULL ? word : "(no string)");
}

/* Extents, strides and the bytes they need. Even the product with zeros counted as ones has to fit, since it
 * is what strides are made of. */
static bool parse_shape(const json_t *entry, const char *name, reader_tensor *tensor, char *text)
{
    const json_t *shape = json_object_get(entry, "shape");
    csa_tensor *view = &tensor->view;
    if (!json_is_array(shape) || json_array_size(shape) > CSA_MAX_DIMS)
        return refuse(text, "tensor %.100s: shape is not a list of at most %d extents", name, CSA_MAX_DIMS);
    view->ndim = (int32_t)json_array_size(shape);
    int64_t stride = (int64_t)reader_element(view->dtype);
    size_t elements = 1;
    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        const json_t *extent = json_array_get(shape, (size_t)i);
        int64_t value = json_integer_value(extent);
        if (!json_is_integer(extent) || value < 0)
            return refuse(text, "tensor %.100s: extent %d is not a whole number from 0 up", name, i);
        view->shape[i] = value;
        view->stride[i] = stride / (int64_t)reader_element(view->dtype);
        elements *= (size_t)value;
        if (value > 0 && __builtin_mul_overflow(stride, value, &stride))
            return refuse(text, "tensor %.100s: its shape has too many elements", name);
    }
    tensor->bytes = elements * reader_element(view->dtype);
    return true;
}

static bool parse_offsets(const json_t *entry, const char *name, const unsigned char *data, size_t size,
                          reader_tensor *tensor, char *text)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return refuse(text, "tensor %.100s: data_offsets are not two whole numbers", name);
    int64_t begin = json_integer_value(first), end = json_integer_value(last);
    if (begin < 0 || end < begin || (uint64_t)end > size)
        return refuse(text, "tensor %.100s: data_offsets %lld to %lld do not lie in the %zu bytes of data",
                      name, (long long)begin, (long long)end, size);
    if ((size_t)(end - begin) != tensor->bytes)
        return refuse(text, "tensor %.100s: dtype and shape need %zu bytes, data_offsets span %lld", name,
                      tensor->bytes, (long long)(end - begin));
    tensor->view.data = (void *)(data + begin);
    return true;
}

static bool parse_tensor(const json_t *entry, const char *name, const unsigned char *data, size_t size,
                         reader_tensor *tensor, char *text)
{
    if (!json_is_object(entry) || json_object_size(entry) != 3)
        return refuse(text, "tensor %.100s: not an object of dtype, shape and data_offsets", name);
    tensor->name = name;
    return parse_dtype(entry, name, tensor, text) && parse_shape(entry, name, tensor, text) &&
           parse_offsets(entry, name, data, size, tensor, text);
}

static bool parse_metadata(const json_t *metadata, char *text)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return refuse(text, "__metadata__ is not an object");
    json_object_foreach ((json_t *)metadata, key, value)
        if (!json_is_string(value))
            return refuse(text, "__metadata__: %.100s is not a string", key);
    return true;
}

/* ---- The whole header --------------------------------------------------------------------------- */

static bool parse_entries(reader *file, const unsigned char *data, size_t size, char *text)
{
    const char *name;
    json_t *entry;
    json_object_foreach (file->header, name, entry) {
        bool ok = strcmp(name, "__metadata__") == 0
                      ? parse_metadata(entry, text)
                      : parse_tensor(entry, name, data, size, &file->tensors[file->count++], text);
        if (!ok)
            return false;
    }
    return true;
}

static int by_place(const void *a, const void *b)
{
    const reader_tensor *x = a, *y = b;
    if (x->view.data != y->view.data)
        return (uintptr_t)x->view.data < (uintptr_t)y->view.data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const reader_tensor *)a)->name, ((const reader_tensor *)b)->name);
}

/* The tensors, sorted by place, follow one another from the first byte of the data to the last. */
static bool covers(const reader *file, const unsigned char *data, size_t size, char *text)
{
    size_t end = 0;
    for (size_t i = 0; i < file->count; i++) {
        const reader_tensor *tensor = &file->tensors[i];
        size_t begin = (size_t)((const unsigned char *)tensor->view.data - data);
        if (begin != end)
            return refuse(text, "tensor %.100s: begins at byte %zu of the data, %s %zu", tensor->name, begin,
                          begin < end ? "inside the one that ends at" : "after a gap from", end);
        end += tensor->bytes;
    }
    return end == size || refuse(text, "%zu bytes after the last tensor", size - end);
}

/* Writers may place a tensor anywhere; views have to be aligned. */
static bool align_tensors(reader *file, char *text)
{
    for (size_t i = 0; i < file->count; i++) {
        reader_tensor *tensor = &file->tensors[i];
        if (tensor->bytes == 0)
            tensor->view.data = NULL;
        if ((uintptr_t)tensor->view.data % reader_element(tensor->view.dtype) == 0)
            continue;
        file->copies[i] = malloc(tensor->bytes);
        if (file->copies[i] == NULL)
            return refuse(text, "out of memory");
        memcpy(file->copies[i], tensor->view.data, tensor->bytes);
        tensor->view.data = file->copies[i];
    }
    return true;
}

static bool parse_tensors(reader *file, const unsigned char *data, size_t size, char *text)
{
    size_t entries = json_object_size(file->header);
    file->tensors = calloc(entries + 1, sizeof *file->tensors);
    file->copies = calloc(entries + 1, sizeof *file->copies);
    if (file->tensors == NULL || file->copies == NULL)
        return refuse(text, "out of memory");
    if (!parse_entries(file, data, size, text))
        return false;
    qsort(file->tensors, file->count, sizeof *file->tensors, by_place);
    if (!covers(file, data, size, text))
        return false;
    qsort(file->tensors, file->count, sizeof *file->tensors, by_name);
    return align_tensors(file, text);
}

/* The header's length, checked against the size of the file; 0 and text if it cannot be right. */
static size_t header_length(const unsigned char *prefix, size_t size, char *text)
{
    uint64_t length = 0;
    if (size < PREFIX) {
        refuse(text, "%zu bytes are too few for a safetensors file", size);
        return 0;
    }
    for (int i = PREFIX - 1; i >= 0; i--)
        length = length << 8 | prefix[i];
    if (length >= 2 && length <= READER_MAX_HEADER && length <= size - PREFIX)
        return (size_t)length;
    refuse(text, "a header of %llu bytes cannot be right in a file of %zu", (unsigned long long)length, size);
    return 0;
}

bool reader_parse(const void *bytes, size_t size, reader *file, char text[READER_TEXT])
{
    *file = (reader){.bytes = size};
    const unsigned char *start = bytes;
    size_t length = header_length(start, size, text);
    if (length == 0)
        return false;
    const char *header = (const char *)start + PREFIX;
    if (header[0] != '{')
        return refuse(text, "the header is not a JSON object");
    file->header = reader_json(header, length, text);
    if (file->header == NULL || !parse_tensors(file, start + PREFIX + length, size - PREFIX - length, text)) {
        reader_close(file);
        return false;
    }
    return true;
}

/* ---- Files -------------------------------------------------------------------------------------- */

static bool read_at(int handle, unsigned char *to, size_t size, size_t offset)
{
    while (size > 0) {
        ssize_t got = pread(handle, to, size, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        to += got;
        offset += (size_t)got;
        size -= (size_t)got;
    }
    return true;
}

/* Reads the file to where its data, which follow the header, are aligned. */
static bool read_all(int handle, size_t size, reader *file, char *text)
{
    unsigned char prefix[PREFIX];
    if (size >= PREFIX && !read_at(handle, prefix, PREFIX, 0))
        return refuse(text, "cannot be read: %s", strerror(errno));
    size_t length = header_length(prefix, size, text);
    if (length == 0)
        return false;
    size_t shift = (ALIGNMENT - (PREFIX + length) % ALIGNMENT) % ALIGNMENT;
    size_t room = (shift + size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    unsigned char *memory = aligned_alloc(ALIGNMENT, room);
    if (memory == NULL)
        return refuse(text, "no memory for %zu bytes", size);
    bool ok = read_at(handle, memory + shift, size, 0) ? reader_parse(memory + shift, size, file, text)
                                                       : refuse(text, "cannot be read to its end");
    if (ok)
        file->memory = memory;
    else
        free(memory);
    return ok;
}

bool reader_open(const char *path, reader *file, char text[READER_TEXT])
{
    *file = (reader){0};
    /* Not to wait for a writer, should it be a pipe. */
    int handle = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (handle < 0)
        return refuse(text, "%s", strerror(errno));
    struct stat status;
    bool ok = false;
    if (fstat(handle, &status) != 0)
        refuse(text, "%s", strerror(errno));
    else if (!S_ISREG(status.st_mode))
        refuse(text, "not a regular file");
    else
        ok = read_all(handle, (size_t)status.st_size, file, text);
    close(handle);
    return ok;
}

void reader_close(reader *file)
{
    for (size_t i = 0; file->copies != NULL && i < file->count; i++)
        free(file->copies[i]);
    free(file->copies);
    free(file->tensors);
    free(file->memory);
    json_decref(file->header);
    *file = (reader){0};
}

const reader_tensor *reader_find(const reader *file, const char *name)
{
    reader_tensor key = {.name = name};
    if (file->count == 0)
        return NULL;
    return bsearch(&key, file->tensors, file->count, sizeof key, by_name);
}

const json_t *reader_metadata(const reader *file)
{
    return json_object_get(file->header, "__metadata__");
}

/* ---- Writing ------------------------------------------------------------------------------------ */

static int by_element(const void *a, const void *b)
{
    const reader_tensor *const *x = a, *const *y = b;
    size_t p = reader_element((*x)->view.dtype), q = reader_element((*y)->view.dtype);
    return p != q ? (p > q ? -1 : 1) : strcmp((*x)->name, (*y)->name);
}

static json_t *describe(const reader_tensor *tensor, size_t offset)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < tensor->view.ndim; i++)
        json_array_append_new(shape, json_integer(tensor->view.shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", reader_dtype_name(tensor->view.dtype), "shape", shape,
                     "data_offsets", (json_int_t)offset, (json_int_t)(offset + tensor->bytes));
}

/* The header's text, padded so that the data are aligned; NULL on failure. */
static char *write_header(const reader_tensor *const *order, size_t count, const json_t *metadata,
                          size_t *length)
{
    json_t *header = json_object();
    bool ok = header != NULL;
    size_t offset = 0;
    if (metadata != NULL)
        ok = ok && json_object_set_new(header, "__metadata__", json_deep_copy(metadata)) == 0;
    for (size_t i = 0; ok && i < count; offset += order[i++]->bytes)
        ok = json_object_set_new(header, order[i]->name, describe(order[i], offset)) == 0;
    char *text = ok ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    if (text == NULL)
        return NULL;
    size_t used = strlen(text);
    *length = (used + PREFIX - 1) / PREFIX * PREFIX;
    char *padded = realloc(text, *length + 1);
    if (padded == NULL)
        free(text);
    else
        memset(padded + used, ' ', *length - used);
    return padded;
}

static bool write_all(FILE *out, const char *header, size_t length, const reader_tensor *const *order,
                      size_t count)
{
    unsigned char prefix[PREFIX];
    for (int i = 0; i < PREFIX; i++)
        prefix[i] = (unsigned char)((uint64_t)length >> 8 * i);
    bool ok = fwrite(prefix, PREFIX, 1, out) == 1 && fwrite(header, length, 1, out) == 1;
    for (size_t i = 0; ok && i < count; i++)
        ok = order[i]->bytes == 0 || fwrite(order[i]->view.data, order[i]->bytes, 1, out) == 1;
    return ok;
}

bool reader_write(const char *path, const reader_tensor *tensors, size_t count, const json_t *metadata,
                  char text[READER_TEXT])
{
    const reader_tensor **order = calloc(count + 1, sizeof *order);
    if (order == NULL)
        return refuse(text, "out of memory");
    for (size_t i = 0; i < count; i++)
        order[i] = &tensors[i];
    qsort(order, count, sizeof *order, by_element);
    size_t length = 0;
    char *header = write_header(order, count, metadata, &length);
    bool ok = header != NULL;
    FILE *out = ok ? fopen(path, "wb") : NULL;
    if (!ok)
        refuse(text, "the header cannot be made");
    else if (out == NULL)
        ok = refuse(text, "%s", strerror(errno));
    else {
        ok = write_all(out, header, length, order, count);
        ok = fclose(out) == 0 && ok;
        if (!ok)
            refuse(text, "%s", strerror(errno));
    }
    free(header);
    free(order);
    return ok;
}

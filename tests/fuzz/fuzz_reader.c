/*
 * Any bytes as a safetensors file: what is accepted must be readable, aligned and findable.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "reader.h"

#include <jansson.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Touches every byte a view covers. */
static unsigned touch(const reader_tensor *tensor)
{
    const volatile unsigned char *bytes = tensor->view.data;
    unsigned sum = 0;
    for (size_t i = 0; i < tensor->bytes; i++)
        sum += bytes[i];
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[READER_TEXT];
    reader file;
    if (!reader_parse(data, size, &file, text))
        return 0;
    size_t bytes = 0;
    for (size_t i = 0; i < file.count; i++) {
        const reader_tensor *tensor = &file.tensors[i];
        touch(tensor);
        bytes += tensor->bytes;
        if (reader_find(&file, tensor->name) != tensor)
            abort();
        if ((uintptr_t)tensor->view.data % reader_element(tensor->view.dtype) != 0)
            abort();
    }
    if (bytes > size)
        abort();
    json_t *value = reader_json((const char *)data, size, text);
    json_decref(value);
    reader_close(&file);
    return 0;
}

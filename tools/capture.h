/*
 * Captures (captures/README.md, format csa-capture/1): a safetensors file as cases of named inputs, outputs and
 * scalars.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_CAPTURE_H
#define CSA_CAPTURE_H

#include "reader.h"

typedef struct capture_tensor {
    size_t owner; /* number of its case */
    bool output;
    const char *name; /* without case and in. or out. */
    const reader_tensor *tensor;
} capture_tensor;

typedef struct capture_case {
    const char *name;
    const char *op;
    struct json_t *scalars;
    const capture_tensor *tensors; /* inputs, then outputs */
    size_t inputs, outputs;
} capture_case;

typedef struct capture {
    reader file;
    capture_case *cases; /* in the file's order */
    size_t count;
    capture_tensor *tensors;
} capture;

/* False and text (without the path) if the file is broken, has another format, a case without an op or a
 * tensor without a case. */
bool capture_open(const char *path, capture *c, char text[READER_TEXT]);

/* Also legal after {0} and twice. */
void capture_close(capture *c);

/* NULL if the case has none of that name. */
const reader_tensor *capture_input(const capture_case *what, const char *name);
const reader_tensor *capture_output(const capture_case *what, const char *name);

/* Is the output listed as one of which only the first rows and columns were kept? */
bool capture_corner(const capture_case *what, const char *name);

#endif

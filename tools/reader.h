/*
 * Safetensors files, read without trust and written. Safetensors: eight bytes with the length of a JSON
 * header (little-endian), the header, then the tensors' bytes without gaps.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_READER_H
#define CSA_READER_H

#include <csa/csa.h>

enum {
    READER_TEXT = 512,            /* bytes of an error text */
    READER_MAX_DEPTH = 16,        /* nesting of JSON */
    READER_MAX_HEADER = 100000000 /* bytes, the limit of the reference implementation */
};

/* view is contiguous, aligned to its element type, and lives as long as the reader; its memory must not be
 * written. Rank 0 (one element) is legal in a file but means "absent" in a view: bytes tells them apart. */
typedef struct reader_tensor {
    const char *name;
    csa_tensor view; /* dtypes: I32, I64, U8, F32, BF16, BOOL, E4M3 */
    size_t bytes;
} reader_tensor;

typedef struct reader {
    reader_tensor *tensors; /* in ascending order of their names */
    size_t count;
    size_t bytes;          /* of the whole file */
    struct json_t *header; /* the parsed header: owns all names */
    void *memory;          /* what reader_open read */
    void **copies;         /* per tensor: the aligned copy that replaced a misaligned one, else NULL */
} reader;

/* Reads a regular file into memory. On failure false, text says why (without the path), and nothing is left to
 * close. The file is refused unless its header is an object of exactly described tensors, each with one of the
 * dtypes above, at most CSA_MAX_DIMS extents whose bytes are those its offsets span, and together covering the
 * data once, without gap or overlap. Memory: a multiple of the file's size. */
bool reader_open(const char *path, reader *file, char text[READER_TEXT]);

/* The same for a file in memory, which must outlive the reader. */
bool reader_parse(const void *bytes, size_t size, reader *file, char text[READER_TEXT]);

/* Also legal after {0} and twice. */
void reader_close(reader *file);

/* NULL if there is none of that name. */
const reader_tensor *reader_find(const reader *file, const char *name);

/* The metadata, a JSON object of strings in the file's order; NULL if the file has none. */
const struct json_t *reader_metadata(const reader *file);

/* Parses a JSON text of at most READER_MAX_DEPTH levels without duplicate names. NULL and text on failure. */
struct json_t *reader_json(const char *json, size_t size, char text[READER_TEXT]);

/* Bytes of one element, 0 for a dtype that no file can hold. */
size_t reader_element(csa_dtype dtype);

/* "F32" and so on; "?" for a dtype that no file can hold. */
const char *reader_dtype_name(csa_dtype dtype);

/* Writes tensors (any order; contiguous; sorted by size of element, so that every one is aligned) and
 * metadata (NULL: none) to path. False and text on failure; what was written so far then stays. */
bool reader_write(const char *path, const reader_tensor *tensors, size_t count, const struct json_t *metadata,
                  char text[READER_TEXT]);

#endif

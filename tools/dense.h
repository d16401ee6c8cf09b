/*
 * Dense attention of a decode step over a paged cache: what CSA is an alternative to, for timing. Plain C in
 * fp32 on OpenMP threads, sharing no code with the library.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_DENSE_H
#define CSA_TOOL_DENSE_H

#include "tool.h"

/* One request's cache and the sizes of a step. */
typedef struct dense_step {
    const void *kv;       /* bf16 or e4m3 [blocks, groups, block_size, 384] */
    const int32_t *table; /* blocks of the request, in order */
    int64_t groups, heads /* per group, up to 16 */, block_size;
    int64_t position; /* tokens [0, position] are attended */
    float scale;
    int32_t threads;
    bool e4m3;
    float kv_scale; /* e4m3 only: of keys and values alike */
} dense_step;

/* The softmax of a part of the tokens for one head, before division by sum. */
typedef struct dense_partial {
    float max, sum, out[CSA_HEAD_SIZE];
} dense_partial;

/* Entries of scratch that a step needs: threads * groups * heads. */
size_t dense_scratch(const dense_step *step);

/* query is bf16 [groups * heads, 192], out fp32 of the same shape. The result depends on threads, since each
 * takes its share of the tokens. */
void dense_decode(const dense_step *step, const uint16_t *query, dense_partial *scratch, float *out);

#endif

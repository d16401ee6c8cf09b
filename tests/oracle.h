/*
 * docs/SPEC.md written down once more, slowly and by other means than src/: integers and double where the
 * library has fp32, plain counting where it sorts. Shares no code with it. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_ORACLE_H
#define CSA_TEST_ORACLE_H

#include "support.h"

/* Section 3 on the arguments' own memory: summaries and ring, or metadata. Tensors are complete (strides filled
 * in); positions and slots are given; with query_start or query_len. */
void oracle_summarize(csa_op op, const csa_summarize_args *args);

/* Section 4: the score of one summary for one row. In *bound: how far another order of additions may lead. */
float oracle_score(const csa_score_args *args, int64_t token, int64_t group, const uint8_t *summary,
                   double *bound);

/* Section 5: list[0 .. min(topk, regions)]. */
void oracle_select(const float *scores, int64_t regions, int64_t current, int64_t topk, int64_t *list);

/* Section 6, without gate: one head of a row that belongs to `request` and stands at `position` (-1: inactive).
 */
typedef struct oracle_attention {
    double out[CSA_HEAD_SIZE];
    double magnitude[CSA_HEAD_SIZE]; /* the same sum over |value| */
    double lse, lse_bound;
    int64_t tokens;
} oracle_attention;
void oracle_attend(const csa_attend_args *args, int64_t request, int64_t position, int64_t row, int64_t head,
                   oracle_attention *result);
double oracle_sigmoid(double x);

/* Section 2: what a head of n values becomes, and how far fp32 rounding may lead. weight_offset is 1 for
 * zero-centred weights; bias: NULL or a layer norm's. */
typedef struct oracle_norm {
    const csa_tensor *weight, *bias, *table; /* table: NULL for no rotation */
    int64_t position;
    double eps;
    bool zero_centered, rounds_twice, native_rope;
} oracle_norm;
void oracle_prepare(const uint16_t *x, int n, const oracle_norm *how, double *out, double *tolerance);

#endif

/*
 * How good sparse attention is: exact attention in double over a recorded context, and how far others are from
 * it. Reads the recorded tensors themselves, not the cache, and shares no code with the library.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_QUALITY_H
#define CSA_TOOL_QUALITY_H

#include "run_context.h"

/* Distance between vectors, over many (row, head) pairs. Not finite if anything compared was not. */
typedef struct deviation {
    double error, norm; /* sums of squares */
    double sum, worst;  /* of the pairs' relative norms */
    int64_t pairs;
} deviation;

void deviation_add(deviation *d, const double *got, const double *want, int64_t size);
double deviation_overall(const deviation *d); /* relative norm */
double deviation_mean(const deviation *d);

/* Dense softmax and attention of one query, all heads. */
typedef struct exact_attention {
    const run_context *source;
    double *logits;    /* [groups * heads, tokens], up to the query's position */
    double *max, *sum; /* [groups * heads]: largest logit, and sum of exp(logit - max) */
    double *out;       /* [groups * heads, head_size] */
} exact_attention;

/* False without memory. */
bool exact_open(exact_attention *e, const run_context *source);
void exact_close(exact_attention *e);

void exact_dense(exact_attention *e, int64_t query);

/* For one head of the query last given to exact_dense, what attention to the tokens of some regions gives.
 * `list` is ascending after any number of -1. Returns the share of softmax mass these regions hold, or -1 if
 * the list is not as it should be. out is [head_size]. */
double exact_sparse(const exact_attention *e, int64_t query, int64_t head, const int64_t *list, int64_t length,
                    double *out);

/* For the same query, adds to mass[r] the share of a head's dense softmax mass that region r holds, for all
 * regions up to the query's own. */
void exact_add_mass(const exact_attention *e, int64_t query, int64_t head, double *mass);

/* Codes to double. */
void quality_widen(const uint16_t *codes, int64_t size, double *values);

#endif

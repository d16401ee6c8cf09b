/*
 * The tool's own judgement of results: plain double-precision functions of docs/SPEC.md that share no code with
 * the library.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_JUDGE_H
#define CSA_JUDGE_H

#include <csa/csa.h>

enum { JUDGE_HEADS = 16 };

/* ---- Numbers ------------------------------------------------------------------------------------ */

/* An element of a bf16, e4m3 or fp32 array, exactly. */
double judge_value(csa_dtype dtype, const void *data, int64_t index);

/* Rounded to bf16, ties to even. */
double judge_round_bf16(double value);

/* The e4m3 code nearest to value, ties to even, saturated; NaN is 0x7F. */
uint8_t judge_to_e4m3(double value);

/* How far apart two elements are: 0 for equal bits, two NaNs and two true bools; else the number of codes
 * between bf16, e4m3 or fp32 values in numeric order, at least 1 (the two zeros); INT64_MAX for NaN against a
 * number and for any other difference. */
int64_t judge_steps(csa_dtype dtype, const void *a, const void *b, int64_t index);

/* ---- Rows (sections 1 and 4) -------------------------------------------------------------------- */

typedef struct judge_row {
    bool active;
    int64_t position; /* 0 where inactive */
    int64_t request;  /* -1: belongs to none */
} judge_row;

/* A token that sees `seen` tokens of a request; slot is only its sign. */
judge_row judge_row_of(int64_t request, int64_t seen, int64_t slot);

/* What rows see of a layer's cache; contiguous. Absent parts are not read. */
typedef struct judge_cache {
    csa_tensor table;     /* int32 [requests, columns] */
    csa_tensor summaries; /* e4m3 [blocks, regions per block, 256] */
    csa_tensor kv;        /* bf16 or e4m3 [blocks, groups, block_size, 384] */
    double k_scale, v_scale;
} judge_cache;

/* The element of kv at which a token's cache row begins, -1 if no block holds it. */
int64_t judge_cache_row(const judge_cache *cache, int64_t request, int64_t group, int64_t token);

/* ---- Scores (section 4) ------------------------------------------------------------------------- */

typedef struct judge_query {
    int32_t heads;
    double value[JUDGE_HEADS][CSA_SUMMARY_SIZE];
    float weight[JUDGE_HEADS];
} judge_query;

/* The first `heads` (at most JUDGE_HEADS) of row number `row` of query [rows, stored, 256] (e4m3; bf16 and fp32
 * are converted to it) and weights [rows, stored]. */
void judge_load_query(judge_query *query, csa_dtype dtype, const void *values, const float *weights,
                      int64_t row, int64_t stored, int32_t heads);

/* The summary of a request's region, NULL if no block holds it. */
const uint8_t *judge_summary(const judge_cache *cache, int64_t request, int64_t region);

/* The score by its definition and how far a result may lie from it. key NULL scores 0. */
void judge_score(const judge_query *query, const uint8_t *key, float *score, double *bound);

/* Is `got` within bound of score? What is not finite has to be equal. */
bool judge_score_within(float got, float score, double bound);

/* ---- Selection (section 5) ---------------------------------------------------------------------- */

/* A region and its score. */
typedef struct judge_ranked {
    float score;
    int64_t region;
} judge_ranked;

/* For qsort: best first, as section 5 has it: NaN below all, equal scores by region. */
int judge_by_rank(const void *a, const void *b);

/* selected[0 .. min(topk, regions)] by a plain sort. False if out of memory. scores is not read if
 * regions <= topk. */
bool judge_select(const float *scores, int64_t regions, int64_t current, int64_t topk, int64_t *selected);

/* ---- Attention (section 6) ---------------------------------------------------------------------- */

typedef struct judge_attend_args {
    const judge_cache *cache;
    double scale;
    int32_t heads;         /* per group, at most JUDGE_HEADS */
    int64_t columns;       /* of the list */
    const uint16_t *query; /* bf16 [rows, heads, 192] */
    const int64_t *list;   /* [rows, columns] */
    const uint16_t *gate;  /* bf16 [rows, heads], NULL: none */
} judge_attend_args;

/* out[heads][192] of row number `number`, a row of this group. */
void judge_attend(const judge_attend_args *args, judge_row row, int64_t number, int64_t group,
                  double out[JUDGE_HEADS][CSA_HEAD_SIZE]);

/* Error norms of bf16 results against exact values, gathered head by head. */
typedef struct judge_norms {
    double error, size; /* sums of squares */
    double worst;       /* largest relative error norm of a head */
    int64_t misplaced;  /* NaN or infinity on one side only */
    int64_t nonzero;    /* not 0 where all of the exact head is 0 */
} judge_norms;

void judge_norms_add(judge_norms *norms, const double exact[CSA_HEAD_SIZE], const uint16_t got[CSA_HEAD_SIZE]);

/* The relative error norm of all heads. */
double judge_norms_total(const judge_norms *norms);

#endif

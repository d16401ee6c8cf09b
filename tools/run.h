/*
 * csa run: what its parts share. A recorded context (run_recorded.c) and a generated one (run_generated.c) are
 * served in the same manner and judged by the same bounds.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_RUN_H
#define CSA_TOOL_RUN_H

#include "options.h"
#include "quality.h"

/* What was asked for. Zero (for drafts, needles and seed -1) means "not said". */
typedef struct run_options {
    const char *path; /* of a recorded context; NULL: generate one */
    const char *tier, *kv, *svg;
    tool_list topk;
    csa_backend backend;
    int64_t threads, block_size, chunk;
    int64_t prompt, requests, steps, drafts, needles, seed; /* from here on of generated contexts only */
    int64_t groups, heads, index_heads;
    bool plain_mean, json;
} run_options;

/* Serve, judge and print; return exit codes. */
int run_recorded(const run_options *options);
int run_generated(const run_options *options);

/* Relative norms that rounding explains. */
typedef struct run_bounds {
    double recorded;    /* our dense attention and the file's, which is rounded to fp32 */
    double dense;       /* dense attention in fp32 and in double */
    double sparse;      /* the library's attention and the exact one, in bf16 */
    double sparse_head; /* the same for the worst head of a row */
} run_bounds;

extern const run_bounds run_limits;

/* What a run comes to: the first failure, or what holds. */
typedef struct run_verdict {
    char text[200];
    bool failed;
} run_verdict;

/* The first failure is the verdict. */
__attribute__((format(printf, 2, 3))) void run_fail(run_verdict *verdict, const char *format, ...);

/* Judge distances of attention from exact attention; `what` begins the verdict's text. Written so that NaN
 * fails. */
void run_judge_dense(run_verdict *verdict, const deviation *dense);
void run_judge_sparse(run_verdict *verdict, const char *what, const deviation *sparse, const deviation *dense,
                      bool bad_list);

/* Both sort. share is in [0, 1]. */
double run_median(double *values, int64_t count);
double run_quantile(double *values, int64_t count, double share);

size_t run_tensor_bytes(const csa_tensor *tensor);

/* JSON has no NaN and no infinity: null. */
struct json_t *run_real(double value);

#endif

/*
 * csa run: serving a generated context, and what is measured on the way.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_RUN_GENERATED_H
#define CSA_TOOL_RUN_GENERATED_H

#include "cost.h"
#include "heatmap.h"
#include "run.h"
#include "run_engine.h"

enum { RUN_SAMPLES = 8 /* steps that are compared with dense attention, and as many chunks at most */ };

/* Rows compared with exact attention over what was selected, and over everything. */
typedef struct sampled_rows {
    deviation sparse, dense;
    double share, lowest_share; /* the sum over (row, head) pairs, and the lowest */
    bool bad_list;
} sampled_rows;

/* A short context served with drafts and without. */
typedef struct run_twins {
    int64_t tokens;      /* of each request that were compared; 0: there are no drafts */
    const char *differs; /* what is not the same; NULL: everything is */
} run_twins;

typedef struct generated {
    run_options options; /* with defaults filled in */
    generator source;
    engine server;

    run_context view; /* one token of a request, for exact attention */
    uint16_t *key, *value;
    exact_attention exact;
    dense_partial *scratch;
    float *dense_out; /* [tokens of a step, groups, heads, 192] */

    double prefill_seconds, decode_seconds, *step_seconds;
    double again_seconds[RUN_SAMPLES]; /* csa_decode alone, of a step */
    double dense_seconds[RUN_SAMPLES]; /* dense attention of all its tokens, by the library's kernels */
    double plain_seconds[RUN_SAMPLES]; /* dense attention of one of its tokens, by plain loops */
    int64_t samples, accepted;
    sampled_rows prefill, decode;
    deviation plain, kernels; /* dense attention by either to the exact one */
    int64_t asked, found;
    double lowest_answer; /* cosine between an output and the needle's value */
    bool not_finite, differs_again;
    run_twins twins;
    cost_step step_cost, prefill_cost;
    heatmap map; /* with --svg */
    run_verdict verdict;
} generated;

/* The engine's options as they follow from the command's. */
engine_options generated_engine(const run_options *options);

/* Serves the beginning with drafts and without. Returns an exit code. */
int run_twins_compare(const run_options *options, run_twins *twins);

/* Dense attention of the last step's tokens by csa_attend over all regions: fp32 [T, G, H, 192], without gate.
 * Sets the best time of some repeats. Returns an exit code. */
int run_dense_step(const engine *e, int64_t repeats, float *out, double *best);

/* Returns an exit code: that of writing. */
int generated_print(generated *g);

#endif

/*
 * A synthetic layer for `csa bench`: a paged cache with a shuffled block table, and a step's inputs. All values
 * are random, so that scores differ and selections lie all over the context.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_BENCH_DATA_H
#define CSA_TOOL_BENCH_DATA_H

#include "bench_memory.h"
#include "cost.h"

typedef struct bench_shape {
    cost_model model;
    int64_t rows; /* tokens per request of a prefill step; 0: a decode step of model.query_len tokens */
    bool gate;    /* attention with its gate */
} bench_shape;

/* Which optional parts of the memory are wanted. */
typedef struct bench_parts {
    bool prepare; /* projections: for prepare, summarize and layer */
    bool kv;      /* the KV cache: for all that read or write it */
    bool ranked;  /* scores and selections: for all but prepare, summarize and gate */
    bool dense;
} bench_parts;

/* Dense attention by the library's own kernel: each row's regions are cut into slices, each slice is a row of
 * one csa_attend call, and the slices' outputs are merged. */
typedef struct bench_dense {
    csa_tokens tokens;
    csa_attend_args attend;
    int64_t slices, columns; /* of a row; regions of a slice */
    int64_t *positions, *owners, *lists;
    uint16_t *query, *partial, *out; /* [T, slices, G, H, 192] twice; [T, G, H, 192] */
    float *lse;                      /* [T, slices, G, H] */
} bench_dense;

typedef struct bench_data {
    bench_shape shape;
    bench_parts parts;
    bench_memory memory;
    const csa_context *context;
    csa_plan *plan; /* of a prefill step */
    csa_plan_args plan_args;
    bool prefill;
    int64_t per_request, count; /* tokens of one request, of all */
    int64_t columns, regions;   /* of the block table; csa_step_args.regions */
    int64_t chunk;              /* tokens whose scores are held at once */

    int32_t *table, *query_start;
    int64_t *slots, *positions, *owners, *current, *ring_base;

    /* Ready to call; score and select: see bench_chunk. */
    csa_tokens tokens;
    csa_cache cache;
    csa_prepare_args prepare;
    csa_summarize_args summarize;
    csa_score_args score;
    csa_select_args select;
    csa_attend_args attend;
    csa_gate_args gate;
    csa_step_args step;
    csa_layer_args layer;
    bench_dense dense;
} bench_data;

/* What a context for it would be made with, and the workspace that context's steps need. */
typedef struct bench_setup {
    csa_context_options options;
    const csa_context *context;
    const bench_device *device; /* where its memory lies; NULL: on the host */
    size_t workspace;
} bench_setup;

/* Bytes that bench_open would allocate. */
uint64_t bench_bytes(const bench_shape *shape, bench_parts parts, size_t workspace);

/* Makes and fills everything. Returns an exit code; what went wrong has been said. After a failure, too,
 * bench_close has to be called. */
int bench_open(bench_data *data, const bench_shape *shape, bench_parts parts, const bench_setup *setup);
void bench_close(bench_data *data);

/* The arguments of score and select for tokens [first, first + data->chunk), and where the chunk ends. */
typedef struct bench_chunk {
    csa_tokens tokens;
    csa_score_args score;
    csa_select_args select;
    int64_t end;
} bench_chunk;

void bench_chunk_at(const bench_data *data, int64_t first, bench_chunk *chunk);

/* Where the tokens of a decode step stand `back` tokens before the end of the context. */
void bench_stand(bench_data *data, int64_t back);

/* The largest step, for csa_workspace_size and csa_warm_up. */
csa_serving bench_serving(const bench_shape *shape);

/* ---- Dense attention (bench_dense.c) ------------------------------------------------------------ */

void bench_lay_out_dense(bench_data *data);
void bench_fill_dense(bench_data *data);
csa_status bench_run_dense(bench_data *data);

#endif

/*
 * Serving a generated context as an engine would: a paged cache with a shuffled block table, one layer, prefill
 * in chunks that end anywhere and may hold tokens of several requests, then steps with speculative drafts of
 * which some are rejected.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_RUN_ENGINE_H
#define CSA_TOOL_RUN_ENGINE_H

#include "dense.h"
#include "run_generate.h"

typedef struct engine_options {
    csa_backend backend;
    const char *tier; /* NULL: the best */
    int32_t threads;  /* 0: the library's default */
    int64_t block_size, chunk, topk;
    int64_t query_len; /* tokens of a step per request: 1 + drafts */
    bool e4m3;         /* the KV cache's type; bf16 otherwise */
} engine_options;

typedef struct engine {
    engine_options options;
    const generator *source;
    csa_context *context;
    csa_cache cache;
    csa_tokens tokens; /* of the step at hand */
    csa_plan *plan;
    csa_workspace workspace;
    int64_t requests, groups, heads, index_heads, block_size, blocks, columns;
    float kv_scale;      /* k_scale and v_scale of an e4m3 cache */
    uint16_t codes[256]; /* its codes, as bf16 */

    /* State of the requests. */
    void *kv;
    uint8_t *summaries;
    uint16_t *ring;
    int32_t *table;  /* [requests, columns] */
    int64_t *length; /* tokens that count, per request */

    /* The step at hand: `count` tokens. */
    int64_t count;
    generate_place *places;
    projections in;
    int64_t *slots, *positions, *ring_base;
    int32_t *query_start;
    uint8_t *index_query; /* prepared: e4m3 [T, G, 8, 256] */
    float *index_weights; /* fp32 [T, G, 8] */
    uint16_t *out;        /* bf16 [T, G, H, 192] */
    uint16_t *again;      /* the same of engine_attend_again */
    int64_t *selected;    /* [T, G, width + 1] */
    int64_t width;        /* of the step: min(topk, regions) */
    double seconds;       /* in the library */

    uint16_t *norms, *index_rope, *rope; /* norms: ones, then zeros */
} engine;

/* The functions below return exit codes; what went wrong has been said. */

/* After a failure, too, engine_close has to be called. */
int engine_open(engine *e, const generator *source, const engine_options *options);
void engine_close(engine *e);

/* One prefill step: the tokens [first, first + count) of all prompts laid end to end. */
int engine_prefill(engine *e, int64_t first, int64_t count);

/* One step for all requests: query_len tokens each, drafts included. */
int engine_decode(engine *e);

/* Score, select, attend and gate of the last step once more, with a call of their own. Sets `seconds`. */
int engine_attend_again(engine *e);

/* How many tokens of a request's last step count: the first, and drafts up to the first wrong one. */
int64_t engine_accepted(const engine *e, int64_t request);

/* Keeps these, for all requests; the next step overwrites the others. Returns how many. */
int64_t engine_advance(engine *e);

/* Dense attention for a token of the last step. */
dense_step engine_dense_step(const engine *e, int64_t token);

/* Keys and values of tokens [0, count) of a request, as the cache holds them: bf16 [count, groups, 192]. */
void engine_gather(const engine *e, int64_t request, int64_t count, uint16_t *key, uint16_t *value);

/* Slot of a token. */
int64_t engine_slot(const engine *e, int64_t request, int64_t position);

#endif

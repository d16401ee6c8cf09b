/*
 * Serving a recorded context through the library, as an engine would: a paged cache with a shuffled block
 * table, prefill in chunks, then decode steps.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_RUN_SERVE_H
#define CSA_TOOL_RUN_SERVE_H

#include "dense.h"
#include "run_context.h"

typedef struct serve_options {
    const char *subcommand; /* that messages come from */
    csa_backend backend;
    const char *tier; /* NULL: the best */
    int32_t threads;  /* 0: the library's default */
    int64_t block_size;
    const int64_t *topk; /* every topk that serve_decode will be given */
    int64_t topk_count;
    bool plain_mean; /* z = 0: a summary is the mean of its index keys */
} serve_options;

/* One request's memory, and what a step needs. */
typedef struct serve {
    const char *subcommand;
    const run_context *source;
    csa_context *context;
    csa_cache cache;
    csa_tokens tokens; /* of the step at hand */
    csa_workspace workspace;
    int64_t block_size, blocks, columns, ring_base;
    uint16_t *kv, *ring, *z, *query; /* z of all tokens; query [queries, groups * heads, 192] */
    uint8_t *summaries;
    int32_t *table;
    int64_t *slots, *positions; /* of all tokens */
    int64_t *selected;          /* [groups, width + 1] of the last decode step */
    uint16_t *out;              /* bf16 [groups * heads, 192] of it */
    int64_t selected_width;     /* width + 1 of it */
} serve;

/* The functions below return exit codes; what went wrong has been said. */

/* Makes the cache and puts every token's key and value into it, later ones than a query sees included. After a
 * failure, too, serve_close has to be called. */
int serve_open(serve *s, const run_context *source, const serve_options *options);
void serve_close(serve *s);

/* Summarises tokens [first, first + count) as a prefill chunk. */
int serve_prefill(serve *s, int64_t first, int64_t count);

/* Summarises the token of a query, as every decode step does first. */
int serve_summarize(serve *s, int64_t query);

/* Scores, selects and attends for a query. */
int serve_decode(serve *s, int64_t query, int64_t topk);

/* The scores of a query's regions up to its own: fp32 [groups, regions]. */
int serve_score(serve *s, int64_t query, int64_t regions, float *scores);

/* Dense attention for a query over the same cache. */
dense_step serve_dense_step(const serve *s, int64_t query);

#endif

/*
 * What a serving configuration reads, writes, computes and holds: arithmetic alone, no library call.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_COST_H
#define CSA_TOOL_COST_H

#include "tool.h"

/* One layer, and the requests it serves. All requests have the same length. */
typedef struct cost_model {
    int64_t context; /* tokens of a request, this step's included */
    int64_t batch;
    int64_t groups;
    int64_t heads;       /* per group */
    int64_t index_heads; /* per group */
    int64_t query_len;   /* tokens of a decode step per request */
    int64_t topk;
    int64_t block_size;
    bool e4m3; /* the KV cache's type; bf16 otherwise */
} cost_model;

enum { COST_PREPARE, COST_SUMMARIZE, COST_SCORE, COST_SELECT, COST_ATTEND, COST_GATE, COST_STAGES };

/* Bytes at the least: what enters and leaves the step moves once, summaries once per request, the cache rows a
 * request's tokens selected at most once per (token, group) and never more often than once per cache row. */
typedef struct cost {
    uint64_t read, written; /* what the step takes in and leaves behind */
    uint64_t between;    /* what stages hand to one another, written and read; a fused step keeps it on chip */
    uint64_t operations; /* a multiply-add is two, an exponential one */
} cost;

typedef struct cost_step {
    cost stages[COST_STAGES];
    cost total;
    cost sparse; /* summarize, score, select and attend: what dense attention is an alternative to */
    cost dense;
} cost_step;

typedef struct cost_memory {
    uint64_t kv, summaries, ring, request; /* of one request; the last is their sum */
    uint64_t all;                          /* of all requests */
} cost_memory;

/* Regions of a full block table, and the index heads that score is given: prepare pads 2 and 4 to 8. */
int64_t cost_regions(const cost_model *model);
int64_t cost_padded_heads(const cost_model *model);

/* A step of `tokens` tokens for each of `requests` requests, the last of them at the end of the context. With
 * prefill, summaries and ring are counted as prefill writes them, otherwise as decode or verify do, averaged
 * over eight steps. */
cost_step cost_of_step(const cost_model *model, int64_t requests, int64_t tokens, bool prefill);

cost_memory cost_of_memory(const cost_model *model);

/* Sums and products stick at UINT64_MAX instead of wrapping. */
uint64_t cost_add(uint64_t a, uint64_t b);
uint64_t cost_mul(uint64_t a, uint64_t b);

/* False for a figure that stuck, or that signed 64-bit numbers (and so JSON) cannot hold. */
bool cost_exact(const cost_step *step);

const char *cost_stage_name(int stage);

#endif

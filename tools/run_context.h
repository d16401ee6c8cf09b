/*
 * A recorded context, the op `context` of a capture: keys and values of one layer, and the queries of its last
 * tokens.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_RUN_CONTEXT_H
#define CSA_TOOL_RUN_CONTEXT_H

#include "reader.h"
#include "tool.h"

/* Tensors lie without gaps and live as long as the context. */
typedef struct run_context {
    reader file;
    char name[64];    /* of the case, cut, with nothing a terminal would obey; so is source */
    char source[128]; /* empty if the file does not say */
    int64_t tokens, queries, groups, heads /* per group */, head_size, index_heads;
    float scale;
    const uint16_t *key, *value;   /* bf16 [tokens, groups, head_size] */
    const uint16_t *query;         /* bf16 [queries, groups * heads, head_size] */
    const uint16_t *index_key, *z; /* bf16 [tokens, 256] */
    const uint8_t *index_query;    /* e4m3 [queries, groups, index_heads, 256] */
    const float *index_weights;    /* fp32 [queries, groups, index_heads] */
    const float *dense;            /* fp32 [queries, groups * heads, head_size], NULL if not recorded */
} run_context;

/* The first case of the file whose op is `context`, or the one of that name. Returns an exit code; on failure
 * it has been said why, in the name of the subcommand, and nothing is left to close. */
int run_context_open(const char *path, const char *name, const char *subcommand, run_context *context);
void run_context_close(run_context *context);

/* Query t stands here. */
int64_t run_context_position(const run_context *context, int64_t query);

#endif

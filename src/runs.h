/*
 * Runs of prefill (section 3): a request's consecutive tokens in one region, on host and device alike.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_RUNS_H
#define CSA_RUNS_H

#include "format.h"
#include "tokens.h"

/* A request's tokens [first, end), cut to the call's tokens: query_start comes from the caller. */
CSA_INLINE void csa_token_range(const csa_tokens *tokens, int64_t request, int64_t *first, int64_t *end)
{
    int64_t count = tokens->slots.shape[0];
    *first = csa_token_first(tokens, request);
    *end = csa_token_first(tokens, request + 1);
    *first = *first < 0 ? 0 : *first;
    *end = *end > count ? count : *end;
}

CSA_INLINE int64_t csa_token_region(const csa_tokens *tokens, int64_t token)
{
    int64_t position = csa_token_position(tokens, token);
    return position < 0 ? -1 : position / CSA_REGION;
}

CSA_INLINE void csa_add_to_run(const csa_tokens *tokens, int64_t token, int64_t *run)
{
    if (!csa_token_active(tokens, token))
        return;
    int64_t offset = csa_token_position(tokens, token) % CSA_REGION;
    if (run[CSA_RUN_SLOT] < 0) {
        run[CSA_RUN_SLOT] = csa_i64(&tokens->slots, token) / CSA_REGION;
        run[CSA_RUN_OFFSET] = offset;
    }
    run[CSA_RUN_TOKENS + offset] = token;
}

/* The metadata of a token: its run, if it is the first of one. run is int64[10]. */
CSA_INLINE void csa_find_run(const csa_tokens *tokens, int64_t token, int64_t *run)
{
    for (int i = 0; i < CSA_RUN_COLUMNS; i++)
        run[i] = i == CSA_RUN_OFFSET ? CSA_REGION : -1;
    int64_t request = csa_token_owner(tokens, token), first, end;
    if (request < 0)
        return;
    csa_token_range(tokens, request, &first, &end);
    int64_t region = csa_token_region(tokens, token);
    bool starts = token == first || (token > first && csa_token_region(tokens, token - 1) != region);
    for (int64_t t = token; starts && t < end && csa_token_region(tokens, t) == region; t++)
        csa_add_to_run(tokens, t, run);
}

#endif

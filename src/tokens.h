/*
 * Where a step's tokens stand, and which memory their ids lead to. Everything that turns an id into an address
 * is here, bounds-checked: a bad id gives -1 or NULL.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOKENS_H
#define CSA_TOKENS_H

#include "tensor.h"

/* Requests of a step, by whichever tensor tells. */
int64_t csa_token_requests(const csa_tokens *tokens);

/* First token of a request, and the end of the last one (request = requests). */
int64_t csa_token_first(const csa_tokens *tokens, int64_t request);

/* The request a token belongs to, -1 if there is none. */
int64_t csa_token_owner(const csa_tokens *tokens, int64_t token);

/* A token's position, -1 where it is negative or unknown. */
int64_t csa_token_position(const csa_tokens *tokens, int64_t token);

/* Neither slot nor position is negative. */
bool csa_token_active(const csa_tokens *tokens, int64_t token);

/* First ring row of a request, -1 if it has no ring. */
int64_t csa_token_ring(const csa_tokens *tokens, int64_t request);

/* The table, if there is one, has a row for the position. */
bool csa_in_table(const csa_tensor *table, int64_t position);

/* The cache row that an active token's K and V go to; NULL if there is no cache, past it, or if the token is
 * inactive. */
void *csa_cache_row(const csa_tokens *tokens, const csa_cache *cache, int64_t token, int64_t group);

/* The ring row of a position: index key, then z. NULL if there is none. */
void *csa_ring_row(const csa_cache *cache, int64_t base, int64_t position);

/* The block that holds a request's tokens [column * block_size, ...), -1 if it is not mapped to one of the
 * cache's blocks. */
int64_t csa_mapped_block(const csa_tensor *block_table, int64_t request, int64_t column, int64_t blocks);

/* How many tokens of a request's region stand at or before a position, and in *block where they are: from row
 * (region % (block_size / 8)) * 8 of that block on. 0 if the region is negative, past the position or not
 * mapped. */
int64_t csa_region_tokens(const csa_tokens *tokens, const csa_tensor *kv, int64_t request, int64_t region,
                          int64_t position, int64_t *block);

/* The summary of a request's region; NULL if its block is not mapped. */
const uint8_t *csa_summary_at(const csa_tokens *tokens, const csa_cache *cache, int64_t request,
                              int64_t region);

/* The summary that belongs to slot / 8; NULL if it lies past the cache. */
uint8_t *csa_summary_of_slot(const csa_cache *cache, int64_t slot_region);

#endif

/*
 * A story is what the tokens of a few requests are, from their first to their last. A telling runs them through
 * the library in steps of some kind, from a cache of its own, and keeps what came out for every token. All
 * tellings of a story must come out the same, whatever their steps, blocks, strides, threads, padding or
 * chunks. SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TEST_STORY_H
#define CSA_TEST_STORY_H

#include "support.h"

typedef struct story_shape {
    int32_t groups, heads, index_heads; /* index heads: 2 or 4 */
    int32_t score_heads;                /* not 0: index queries come from outside, with so many heads */
    int32_t topk, requests, rotary;
    csa_dtype kv_dtype;
    int64_t prefix, tail; /* at most so many tokens before, and exactly so many in, what is compared */
    bool every_offset;    /* request r's tail starts at position r mod 8 */
    bool ties;            /* regions repeat, so that many scores are equal */
    bool zero_centered, native_rope;
} story_shape;

/* Row numbers: tokens of all requests one after the other; "tail" tensors have the compared tokens only. */
typedef struct story {
    story_shape shape;
    test_random random;
    arena memory;
    int64_t rows, longest;
    int64_t *first;                                     /* [requests + 1] first row of each request */
    int64_t *prefix;                                    /* [requests] */
    csa_tensor index_key, z, key, value;                /* [rows, ...] */
    csa_tensor index_query, index_weights, query, gate; /* [tail rows, ...] */
    csa_tensor score_query, score_weights;              /* [tail rows, ...], with score_heads */
    csa_tensor index_query_norm, index_key_norm, index_key_bias, index_rope, query_norm, key_norm, rope, scales;
} story;

void story_make(story *s, story_shape shape, uint64_t number);
void story_end(story *s);

/* A context and the options it was made with. */
typedef struct runner {
    csa_context_options options;
    csa_context *context;
} runner;

typedef struct telling_options {
    const runner *runner;
    int32_t block_size;
    int64_t ring_capacity;
    int64_t more_regions; /* in score rows than needed; -1: leave `regions` 0 */
    bool strided, separate, stages, padding, metadata;
    /* separate: not csa_layer but its parts; stages: not even csa_decode; padding: some requests of a step are
     * inactive; metadata: prefill's is made first */
} telling_options;

typedef struct telling {
    const story *story;
    telling_options options;
    test_random random;
    arena memory;
    csa_cache cache;
    csa_tensor block_table, ring_base;
    int64_t columns;
    int64_t *done; /* tokens of each request that the cache holds */
    /* What came out, per tail row. */
    csa_tensor index_key, out, lse, selected, scores;
} telling;

/* An empty cache, then the prefixes. */
void telling_begin(telling *t, const story *s, telling_options options, uint64_t number);
void telling_end(telling *t);

/* Tokens [first, first + count) of a request, the last `drafts` of them not the story's: to be rejected.
 * Request -1: padding. */
typedef struct story_part {
    int64_t request, first, count, drafts;
} story_part;

/* One step; the first `prefill` parts are prefill, the others have query_len tokens (the last step of a request
 * may have fewer if nothing is prefilled). A part may begin before `done`: what lies behind is then told anew.
 */
void telling_step(telling *t, const story_part *parts, int32_t count, int32_t prefill, int32_t query_len);

/* Tells the tails: token by token, query_len at a time, in random chunks of prefill, or any of these. */
void telling_decode(telling *t);
void telling_verify(telling *t, int32_t query_len);
void telling_prefill(telling *t, int64_t largest_chunk);
void telling_mixed(telling *t);

/* The same outputs, cache rows, summaries of closed regions and ring rows of open ones. */
void telling_expect_equal(const telling *got, const telling *expected);

#endif

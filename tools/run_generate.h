/*
 * A generated context with structure: what a layer's projections could be for the tokens of some requests.
 *
 * Passages of tokens follow one another, each about a topic; topics come back. Tokens of a passage share a
 * direction, those of a topic another, in index keys, keys and values alike, and queries look for both. A few
 * needles are planted in the prompt, tokens with keys of their own; each is asked for once while decoding.
 *
 * Everything follows from the seed, request and position, so that any engine sees the same tokens.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CSA_TOOL_RUN_GENERATE_H
#define CSA_TOOL_RUN_GENERATE_H

#include "tool.h"

enum { GENERATE_TOPICS = 48, GENERATE_ROTARY = 64 /* of the attention part */ };

typedef struct generate_options {
    uint64_t seed;
    int64_t requests, prompt; /* tokens of a request before decoding */
    int64_t tokens;           /* most tokens of a request, drafts included */
    int64_t steps;   /* decoded tokens that are sure to be accepted, over which needles are asked for */
    int64_t needles; /* of a request, at most `steps` and a quarter of the prompt's regions */
    int64_t groups, heads, index_heads;
    bool plain_mean; /* z = 0 */
} generate_options;

/* What is decided about a token beforehand. */
typedef struct generate_token {
    int32_t passage;
    int16_t topic;
    int16_t plant, ask; /* the needle that is planted, or asked for, here; -1: none */
} generate_token;

typedef struct generator {
    generate_options options;
    float *noise;           /* random numbers, of which every vector is made */
    generate_token *tokens; /* [requests, tokens] */
    int64_t *needles;       /* [requests, needles]: positions */
    int64_t passages;       /* of all prompts */
} generator;

/* Projections of some tokens, contiguous, bf16. */
typedef struct projections {
    uint16_t *index_query;   /* [T, G, index heads, 256] */
    uint16_t *index_key, *z; /* [T, 256] */
    uint16_t *index_weights; /* [T, G, index heads] */
    uint16_t *query;         /* [T, G, H, 192] */
    uint16_t *key, *value;   /* [T, G, 192] */
    uint16_t *gate;          /* [T, G, H] */
} projections;

/* Which token to make: the one at its position, or a draft that is wrong. */
typedef struct generate_place {
    int64_t request, position;
    bool wrong;
} generate_place;

/* False without memory; generate_close is to be called all the same. */
bool generate_open(generator *g, const generate_options *options);
void generate_close(generator *g);

/* Writes the projections of token number i for places[i], on OpenMP threads. */
void generate_tokens(const generator *g, const generate_place *places, int64_t count, const projections *out);

/* Is draft number `draft` (from 1) right, in a step whose first token stands at `position`? Seven of ten are.
 */
bool generate_accepts(const generator *g, int64_t request, int64_t position, int64_t draft);

const generate_token *generate_token_at(const generator *g, int64_t request, int64_t position);

/* The value [192] of a needle in a group, up to noise. */
const float *generate_needle_value(const generator *g, int64_t request, int64_t needle, int64_t group);

/* Rows of cosines, then sines: bf16 [positions, rotary]. */
void generate_rope(uint16_t *table, int64_t positions, int64_t rotary);

#endif

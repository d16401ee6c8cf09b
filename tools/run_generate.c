/*
 * A generated context with structure.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "run_generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    NOISE = 1 << 18,
    SHORTEST = 24, /* tokens of a passage */
    LONGEST = 200,
    ACCEPTED = 70, /* per cent of the drafts */
    MOST_TERMS = 5
};

/* What vectors are for: the first word of what their random numbers follow from. */
typedef enum purpose {
    ABOUT_STRUCTURE = 1,
    ABOUT_DRAFT,
    ABOUT_TOKEN,
    INDEX_TOPIC,
    INDEX_PASSAGE,
    INDEX_HEAD,
    INDEX_NEEDLE,
    KEY_TOPIC,
    KEY_PASSAGE,
    KEY_NEEDLE,
    VALUE_TOPIC,
    VALUE_NEEDLE
} purpose;

/* A vector's share of a sum. */
typedef struct term {
    float weight;
    const float *values;
} term;

/* ---- Random numbers ----------------------------------------------------------------------------- */

static uint64_t scramble(uint64_t x) /* splitmix64 */
{
    x += 0x9E3779B97F4A7C15U;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
    x = (x ^ x >> 27) * 0x94D049BB133111EBU;
    return x ^ x >> 31;
}

static uint64_t number_of(const generator *g, purpose what, int64_t a, int64_t b, int64_t c)
{
    uint64_t x = scramble(g->options.seed ^ scramble((uint64_t)what));
    x = scramble(x ^ (uint64_t)a);
    x = scramble(x ^ (uint64_t)b);
    return scramble(x ^ (uint64_t)c);
}

/* A random vector that is the same whenever it is asked for; its entries have mean 0 and variance 1. */
static const float *vector_of(const generator *g, purpose what, int64_t a, int64_t b, int64_t c)
{
    return g->noise + number_of(g, what, a, b, c) % NOISE;
}

static void fill_noise(generator *g)
{
    uint64_t state = g->options.seed;
    for (int64_t i = 0; i < NOISE + CSA_SUMMARY_SIZE; i++) {
        double sum = 0; /* of twelve uniform numbers: nearly normal */
        for (int j = 0; j < 3; j++) {
            state = scramble(state);
            for (int k = 0; k < 4; k++)
                sum += (double)(state >> 16 * k & 0xFFFF) / 65536;
        }
        g->noise[i] = (float)(sum - 6);
    }
}

/* ---- Structure ---------------------------------------------------------------------------------- */

/* Low topics are frequent, high ones rare: topic k comes as often as k^(-1/3). */
static int16_t draw_topic(uint64_t random)
{
    double u = (double)(random >> 11) / 0x1p53;
    return (int16_t)(u * sqrt(u) * GENERATE_TOPICS);
}

static generate_token *tokens_of(const generator *g, int64_t request)
{
    return g->tokens + request * g->options.tokens;
}

static void draw_passages(generator *g, int64_t request)
{
    generate_token *tokens = tokens_of(g, request);
    int32_t passage = 0;
    for (int64_t end, first = 0; first < g->options.tokens; first = end, passage++) {
        uint64_t random = number_of(g, ABOUT_STRUCTURE, request, passage, 0);
        int16_t topic = draw_topic(scramble(random));
        end = first + SHORTEST + (int64_t)(random % (LONGEST - SHORTEST + 1));
        end = end < g->options.tokens ? end : g->options.tokens;
        g->passages += first < g->options.prompt;
        for (int64_t t = first; t < end; t++)
            tokens[t] = (generate_token){.passage = passage, .topic = topic, .plant = -1, .ask = -1};
    }
}

/* Needle i stands somewhere in the i-th part of the prompt, without its last region, which may still be open
 * when decoding begins. They are asked for in another order, once each. */
static void plant_needles(generator *g, int64_t request)
{
    const generate_options *o = &g->options;
    generate_token *tokens = tokens_of(g, request);
    int64_t room = (o->prompt / CSA_REGION - 1) * CSA_REGION;
    for (int64_t i = 0; i < o->needles; i++) {
        int64_t first = room * i / o->needles, end = room * (i + 1) / o->needles;
        int64_t at = first + (int64_t)(number_of(g, ABOUT_STRUCTURE, request, -1, i) % (uint64_t)(end - first));
        int64_t turn = (i * 5 + 3) % o->needles; /* a permutation unless 5 divides the count */
        if (o->needles % 5 == 0)
            turn = o->needles - 1 - i;
        tokens[at].plant = (int16_t)i;
        tokens[o->prompt + turn * o->steps / o->needles].ask = (int16_t)i;
        g->needles[request * o->needles + i] = at;
    }
}

bool generate_open(generator *g, const generate_options *options)
{
    *g = (generator){.options = *options};
    g->noise = calloc(NOISE + CSA_SUMMARY_SIZE, sizeof *g->noise);
    g->tokens = calloc((size_t)(options->requests * options->tokens), sizeof *g->tokens);
    g->needles = calloc((size_t)(options->requests * options->needles) + 1, sizeof *g->needles);
    if (!g->noise || !g->tokens || !g->needles)
        return false;
    fill_noise(g);
    for (int64_t r = 0; r < options->requests; r++) {
        draw_passages(g, r);
        plant_needles(g, r);
    }
    return true;
}

void generate_close(generator *g)
{
    free(g->noise);
    free(g->tokens);
    free(g->needles);
}

const generate_token *generate_token_at(const generator *g, int64_t request, int64_t position)
{
    return tokens_of(g, request) + position;
}

bool generate_accepts(const generator *g, int64_t request, int64_t position, int64_t draft)
{
    return number_of(g, ABOUT_DRAFT, request, position, draft) % 100 < ACCEPTED;
}

const float *generate_needle_value(const generator *g, int64_t request, int64_t needle, int64_t group)
{
    return vector_of(g, VALUE_NEEDLE, request, needle, group);
}

/* ---- Tokens ------------------------------------------------------------------------------------- */

static uint16_t to_bf16(float value) /* finite */
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* The sum of some vectors. The first `plain` values, which RoPE rotates, get the last one alone, the token's
 * noise: content that turned with the position would not be found again. */
static void blend(uint16_t *out, int64_t size, int64_t plain, const term *terms, int count)
{
    float sum[CSA_SUMMARY_SIZE];
    const term *noise = &terms[count - 1];
#pragma omp simd
    for (int64_t i = 0; i < size; i++)
        sum[i] = noise->weight * noise->values[i];
    for (int j = 0; j + 1 < count; j++) {
        float weight = terms[j].weight;
        const float *values = terms[j].values;
#pragma omp simd
        for (int64_t i = plain; i < size; i++)
            sum[i] += weight * values[i];
    }
    for (int64_t i = 0; i < size; i++)
        out[i] = to_bf16(sum[i]);
}

/* A token as it is made, with the random numbers that are its own. */
typedef struct maker {
    const generator *g;
    generate_token token;
    int64_t request;
    uint64_t own;
    uint64_t drawn; /* how many vectors of noise it has taken */
} maker;

static term own_noise(maker *m, float weight)
{
    return (term){weight, m->g->noise + scramble(m->own + ++m->drawn) % NOISE};
}

static maker begin_token(const generator *g, generate_place place)
{
    maker m = {.g = g, .token = *generate_token_at(g, place.request, place.position), .request = place.request};
    m.own = number_of(g, ABOUT_TOKEN, place.request, place.position, place.wrong);
    if (place.wrong) {
        m.token.topic = (int16_t)(m.own % GENERATE_TOPICS);
        m.token.passage = -1;
        m.token.ask = -1;
    }
    return m;
}

/* Each group also looks for a topic that goes with the token's own, so that groups select differently. */
static int64_t companion(const maker *m, int64_t group)
{
    return (7 * (int64_t)m->token.topic + group + 1) % GENERATE_TOPICS;
}

static void make_index_queries(maker *m, uint16_t *out)
{
    const generate_options *o = &m->g->options;
    const generate_token *t = &m->token;
    for (int64_t row = 0; row < o->groups * o->index_heads; row++) {
        int64_t group = row / o->index_heads;
        bool asks = t->ask >= 0, narrow = row % 2 != 0;
        const term looks[MOST_TERMS] = {
            {0.75F, vector_of(m->g, INDEX_TOPIC, t->topic, 0, 0)},
            {0.3F, vector_of(m->g, INDEX_TOPIC, companion(m, group), 0, 0)},
            {narrow ? 0.6F : 0.3F, vector_of(m->g, INDEX_PASSAGE, m->request, t->passage, 0)},
            {0.3F, vector_of(m->g, INDEX_HEAD, row, 0, 0)},
            own_noise(m, 0.4F),
        };
        const term wants[] = {{1, vector_of(m->g, INDEX_NEEDLE, m->request, t->ask, 0)}, own_noise(m, 0.3F)};
        blend(out + row * CSA_SUMMARY_SIZE, CSA_SUMMARY_SIZE, CSA_INDEX_ROTARY, asks ? wants : looks,
              asks ? 2 : MOST_TERMS);
    }
}

static void make_index_key(maker *m, uint16_t *out)
{
    const generate_token *t = &m->token;
    bool planted = t->plant >= 0;
    const term usual[] = {{0.75F, vector_of(m->g, INDEX_TOPIC, t->topic, 0, 0)},
                          {0.5F, vector_of(m->g, INDEX_PASSAGE, m->request, t->passage, 0)},
                          own_noise(m, 0.6F)};
    const term needle[] = {{1, vector_of(m->g, INDEX_NEEDLE, m->request, t->plant, 0)}, own_noise(m, 0.2F)};
    blend(out, CSA_SUMMARY_SIZE, CSA_INDEX_ROTARY, planted ? needle : usual, planted ? 2 : 3);
}

/* How loudly a token speaks for its region: needles above all. */
static void make_z(maker *m, uint16_t *out)
{
    term noise = own_noise(m, 0.5F);
    float loud = m->token.plant >= 0 ? 5 : (float)(m->own >> 40 & 0xFF) / 128;
    for (int64_t i = 0; i < CSA_SUMMARY_SIZE; i++)
        out[i] = m->g->options.plain_mean ? 0 : to_bf16(loud + noise.weight * noise.values[i]);
}

static void make_index_weights(maker *m, uint16_t *out)
{
    term noise = own_noise(m, 0.15F);
    for (int64_t i = 0; i < m->g->options.groups * m->g->options.index_heads; i++)
        out[i] = to_bf16(1 + noise.weight * noise.values[i]);
}

/* Heads differ in how much of them is noise: the first are sharp, the last look at everything a little. */
static void make_queries(maker *m, uint16_t *out)
{
    const generate_options *o = &m->g->options;
    const generate_token *t = &m->token;
    for (int64_t row = 0; row < o->groups * o->heads; row++) {
        int64_t group = row / o->heads;
        float blur = 0.4F + 0.9F * (float)(row % o->heads) / (float)o->heads;
        bool asks = t->ask >= 0;
        const term looks[] = {{0.75F, vector_of(m->g, KEY_TOPIC, t->topic, group, 0)},
                              {0.3F, vector_of(m->g, KEY_TOPIC, companion(m, group), group, 0)},
                              {0.4F, vector_of(m->g, KEY_PASSAGE, m->request, t->passage, group)},
                              own_noise(m, blur)};
        const term wants[] = {{1, vector_of(m->g, KEY_NEEDLE, m->request, t->ask, group)}, own_noise(m, 0.15F)};
        blend(out + row * CSA_HEAD_SIZE, CSA_HEAD_SIZE, GENERATE_ROTARY, asks ? wants : looks, asks ? 2 : 4);
    }
}

static void make_keys(maker *m, uint16_t *keys, uint16_t *values)
{
    const generate_token *t = &m->token;
    bool planted = t->plant >= 0;
    for (int64_t group = 0; group < m->g->options.groups; group++) {
        const term usual[] = {{0.75F, vector_of(m->g, KEY_TOPIC, t->topic, group, 0)},
                              {0.5F, vector_of(m->g, KEY_PASSAGE, m->request, t->passage, group)},
                              own_noise(m, 0.6F)};
        const term needle[] = {{1, vector_of(m->g, KEY_NEEDLE, m->request, t->plant, group)},
                               own_noise(m, 0.15F)};
        const term told[] = {{0.5F, vector_of(m->g, VALUE_TOPIC, t->topic, group, 0)}, own_noise(m, 0.8F)};
        const term secret[] = {{1, generate_needle_value(m->g, m->request, t->plant, group)},
                               own_noise(m, 0.1F)};
        int64_t at = group * CSA_HEAD_SIZE;
        blend(keys + at, CSA_HEAD_SIZE, GENERATE_ROTARY, planted ? needle : usual, planted ? 2 : 3);
        blend(values + at, CSA_HEAD_SIZE, 0, planted ? secret : told, 2);
    }
}

static void make_gates(maker *m, uint16_t *out)
{
    term noise = own_noise(m, 1);
    for (int64_t i = 0; i < m->g->options.groups * m->g->options.heads; i++)
        out[i] = to_bf16(noise.values[i]);
}

static void make_token(const generator *g, generate_place place, int64_t i, const projections *out)
{
    const generate_options *o = &g->options;
    int64_t index_rows = o->groups * o->index_heads, rows = o->groups * o->heads;
    maker m = begin_token(g, place);
    make_index_queries(&m, out->index_query + i * index_rows * CSA_SUMMARY_SIZE);
    make_index_key(&m, out->index_key + i * CSA_SUMMARY_SIZE);
    make_z(&m, out->z + i * CSA_SUMMARY_SIZE);
    make_index_weights(&m, out->index_weights + i * index_rows);
    make_queries(&m, out->query + i * rows * CSA_HEAD_SIZE);
    make_keys(&m, out->key + i * o->groups * CSA_HEAD_SIZE, out->value + i * o->groups * CSA_HEAD_SIZE);
    make_gates(&m, out->gate + i * rows);
}

void generate_tokens(const generator *g, const generate_place *places, int64_t count, const projections *out)
{
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++)
        make_token(g, places[i], i, out);
}

void generate_rope(uint16_t *table, int64_t positions, int64_t rotary)
{
    int64_t half = rotary / 2;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < positions; p++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * pow(10000, (double)-i / (double)half);
            table[p * rotary + i] = to_bf16((float)cos(angle));
            table[p * rotary + half + i] = to_bf16((float)sin(angle));
        }
}

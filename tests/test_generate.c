/*
 * csa run: the generated context, the verdict, and the heat map.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include "heatmap.h"
#include "run.h"
#include "run_generate.h"

enum { GROUPS = 2, HEADS = 3, INDEX_HEADS = 2, PROMPT = 300, STEPS = 9 };

static generate_options options_of(int64_t needles, int64_t tokens)
{
    return (generate_options){.seed = 5,
                              .requests = 3,
                              .prompt = PROMPT,
                              .tokens = tokens,
                              .steps = STEPS,
                              .needles = needles,
                              .groups = GROUPS,
                              .heads = HEADS,
                              .index_heads = INDEX_HEADS};
}

/* ---- The context -------------------------------------------------------------------------------- */

/* Each needle stands in a region of its own that is closed when decoding begins, and is asked for once, among
 * the tokens that are sure to come. */
static void needles_are_planted_and_asked_for_once(void **state)
{
    (void)state;
    for (int64_t needles = 0; needles <= STEPS; needles++) {
        generator g;
        generate_options o = options_of(needles, PROMPT + 50);
        CHECK(generate_open(&g, &o));
        for (int64_t r = 0; r < o.requests; r++) {
            int64_t planted[STEPS] = {0}, asked[STEPS] = {0}, before = -1;
            for (int64_t t = 0; t < o.tokens; t++) {
                const generate_token *token = generate_token_at(&g, r, t);
                if (token->plant >= 0) {
                    planted[token->plant]++;
                    CHECK(g.needles[r * needles + token->plant] == t && t < PROMPT / 8 * 8 - 8);
                    CHECK(t / 8 > before);
                    before = t / 8;
                }
                if (token->ask >= 0) {
                    asked[token->ask]++;
                    CHECK(t >= PROMPT && t < PROMPT + STEPS);
                }
            }
            for (int64_t i = 0; i < needles; i++)
                CHECKF(planted[i] == 1 && asked[i] == 1, "needle %d of %d", (int)i, (int)needles);
        }
        generate_close(&g);
    }
}

/* Room for the projections of two tokens. */
typedef struct room {
    uint16_t index_query[2][GROUPS * INDEX_HEADS * 256], index_key[2][256], z[2][256];
    uint16_t index_weights[2][GROUPS * INDEX_HEADS], query[2][GROUPS * HEADS * 192];
    uint16_t key[2][GROUPS * 192], value[2][GROUPS * 192], gate[2][GROUPS * HEADS];
} room;

static void make(const generator *g, const generate_place places[2], room *r)
{
    projections out = {r->index_query[0], r->index_key[0], r->z[0],     r->index_weights[0],
                       r->query[0],       r->key[0],       r->value[0], r->gate[0]};
    memset(r, 0, sizeof *r);
    generate_tokens(g, places, 2, &out);
}

static void tokens_follow_from_their_place(void **state)
{
    (void)state;
    static room a, b;
    generator g, longer;
    generate_options o = options_of(4, PROMPT + 50), more = options_of(4, PROMPT + 500);
    CHECK(generate_open(&g, &o) && generate_open(&longer, &more));
    for (int64_t t = 0; t < o.prompt; t += 7) {
        const generate_place places[2] = {{1, t, false}, {2, t, false}},
                             turned[2] = {{2, t, false}, {1, t, false}};
        make(&g, places, &a);
        make(&longer, turned, &b);
        CHECK(memcmp(a.query[0], b.query[1], sizeof a.query[0]) == 0);
        CHECK(memcmp(a.index_query[1], b.index_query[0], sizeof a.index_query[1]) == 0);
        CHECK(memcmp(a.key[0], b.key[1], sizeof a.key[0]) == 0);
        CHECK(memcmp(a.z[1], b.z[0], sizeof a.z[1]) == 0);
        CHECK(memcmp(a.key[0], a.key[1], sizeof a.key[0]) != 0);
        const generate_place wrong[2] = {{1, t, true}, {2, t, false}};
        make(&g, wrong, &b);
        CHECK(memcmp(a.index_key[0], b.index_key[0], sizeof a.index_key[0]) != 0);
        CHECK(memcmp(a.index_key[1], b.index_key[1], sizeof a.index_key[1]) == 0);
    }
    generate_close(&g);
    generate_close(&longer);
}

/* ---- The verdict -------------------------------------------------------------------------------- */

static void verdicts_fail(void **state)
{
    (void)state;
    const double zero[2] = {0, 0}, one[2] = {1, 0}, near[2] = {1, 0.0039}, far[2] = {1, 0.0041},
                 none[2] = {NAN, 0};
    const struct {
        const double *got;
        bool bad_list, fails;
    } cases[] = {{one, false, false}, {near, false, false}, {far, false, true},
                 {none, false, true}, {one, true, true},    {zero, false, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_verdict v = {.failed = false};
        deviation d = {0};
        deviation_add(&d, cases[i].got, one, 2);
        run_judge_sparse(&v, "test", &d, &d, cases[i].bad_list);
        CHECKF(v.failed == cases[i].fails, "case %d: %s", (int)i, v.text);
    }
    run_verdict v = {.failed = false};
    run_fail(&v, "first %d", 1);
    run_fail(&v, "second");
    CHECK(v.failed && strcmp(v.text, "first 1") == 0);
}

/* ---- The heat map ------------------------------------------------------------------------------- */

static void pictures_stay_small(void **state)
{
    (void)state;
    heatmap h;
    char path[] = "/tmp/csa-heatmap-XXXXXX";
    int file = mkstemp(path);
    CHECK(file >= 0);
    CHECK(heatmap_open(&h, 2000, 30000));
    CHECK(h.bins <= 1000 && 2000 / h.row_bin <= 1000);
    for (int64_t row = 0; row < 2000; row++) {
        const int64_t list[] = {-1, row, row * 3 % 29000, 29999, 40000};
        heatmap_add(&h, row, row, 29999, list, 5);
    }
    heatmap_add_mark(&h, 1999, 29999);
    h.row_name = "a < b & c";
    h.selected_name = "selected";
    CHECK(heatmap_write(&h, "test", path) == TOOL_OK);
    heatmap_close(&h);
    FILE *in = fdopen(file, "r");
    static char text[1 << 22];
    size_t size = in ? fread(text, 1, sizeof text - 1, in) : 0;
    CHECK(size > 1000 && size < sizeof text - 1);
    CHECK(strncmp(text, "<?xml", 5) == 0 && strcmp(text + size - 7, "</svg>\n") == 0);
    CHECK(strstr(text, "a &lt; b &amp; c") != NULL);
    fclose(in);
    remove(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(needles_are_planted_and_asked_for_once),
        cmocka_unit_test(tokens_follow_from_their_place),
        cmocka_unit_test(verdicts_fail),
        cmocka_unit_test(pictures_stay_small),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

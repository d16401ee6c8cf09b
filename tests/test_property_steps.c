/*
 * Whole steps are their parts, one after the other: the same bytes in every output, the cache, the summaries
 * and the ring. Twin worlds run one each. SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

static csa_context *context; /* for the parts */
static csa_context *others[4];

static int make_contexts(void **state)
{
    (void)state;
    context = test_context((csa_context_options){.threads = 2});
    others[0] = test_context((csa_context_options){.threads = 1});
    others[1] = test_context((csa_context_options){.threads = 7});
    others[2] = test_context((csa_context_options){.threads = 7, .parallel_for = pool_for, .check = true});
    others[3] =
        test_context((csa_context_options){.threads = 3, .parallel_for = reverse_for, .scratch_limit = 1});
    return 0;
}

static int end_contexts(void **state)
{
    (void)state;
    csa_context_destroy(context);
    for (int i = 0; i < 4; i++)
        csa_context_destroy(others[i]);
    return 0;
}

static world_shape draw_shape(test_random *r)
{
    return (world_shape){
        .groups = (int32_t)random_between(r, 1, 8),
        .heads = (int32_t)random_between(r, 1, 5),
        .index_heads = RANDOM_OF(r, 2, 4),
        .block_size = RANDOM_OF(r, 16, 32, 64, 128),
        .topk = RANDOM_OF(r, 1, 3, 7, 200),
        .requests = (int32_t)random_between(r, 1, 4),
        .query_len = (int32_t)random_between(r, 1, 4),
        .kv_dtype = random_chance(r, 50) ? CSA_BF16 : CSA_E4M3,
        .max_length = random_between(r, 4, 90),
        .rotary = RANDOM_OF(r, -1, 64),
        .strided = random_chance(r, 50),
        .inactive = random_chance(r, 50),
    };
}

/* The first requests of a world are prefill (they have query_len tokens each, too), the others decode. */
typedef struct pair {
    world w;
    int64_t prefill; /* requests */
    csa_plan *plan;
} pair;

static void make_plan(pair *p, const csa_context *of)
{
    csa_plan_args args = {.size = sizeof args,
                          .tokens = p->prefill * p->w.shape.query_len,
                          .requests = p->prefill,
                          .regions = p->w.regions,
                          .groups = p->w.shape.groups,
                          .topk = p->w.shape.topk,
                          .invariant = true};
    CHECK_OK(csa_plan_prefill(of, &args, &p->plan));
}

static void make_pair(pair *p, uint64_t draw, const csa_context *of)
{
    test_random r = random_of(draw, 21);
    world_shape shape = draw_shape(&r);
    memset(p, 0, sizeof *p);
    p->prefill = random_chance(&r, 60) ? random_between(&r, 1, shape.requests) : 0;
    world_make(&p->w, shape, draw);
    if (!p->prefill)
        return;
    p->w.step.query_start = arena_tensor(&p->w.memory, "query_start", NULL, CSA_I32, 1, shape.requests + 1);
    for (int64_t q = 0; q <= shape.requests; q++)
        tensor_put(&p->w.step.query_start, (double)(q * shape.query_len), q, 0, 0, 0);
    make_plan(p, of);
}

static void end_pair(pair *p)
{
    csa_plan_destroy(p->plan);
    world_end(&p->w);
}

/* A view of requests [first, first + count). */
static csa_tokens requests_of(const world *w, int64_t first, int64_t count)
{
    csa_tokens k = w->step;
    int64_t q = w->shape.query_len;
    k.block_table = tensor_slice(k.block_table, first, count);
    k.ring_base = tensor_slice(k.ring_base, first, count);
    k.slots = tensor_slice(k.slots, first * q, count * q);
    k.positions = tensor_slice(k.positions, first * q, count * q);
    k.query_start = first ? (csa_tensor){0} : tensor_slice(k.query_start, 0, count + 1);
    return k;
}

static csa_rows rows_of(const csa_rows *all, int64_t first, int64_t count)
{
    return (csa_rows){.size = sizeof(csa_rows),
                      .active = tensor_slice(all->active, first, count),
                      .positions = tensor_slice(all->positions, first, count),
                      .current = tensor_slice(all->current, first, count),
                      .lengths = tensor_slice(all->lengths, first, count),
                      .topk_lengths = tensor_slice(all->topk_lengths, first, count)};
}

/* csa_decode's arguments for some requests; index queries and queries are the prepared ones. */
static csa_step_args step_of(world *w, const csa_tokens *tokens, csa_rows *rows, int64_t first, int64_t count)
{
    csa_step_args a = world_step(w);
    int64_t q = w->shape.query_len, g = w->shape.groups;
    *rows = rows_of(&w->rows_out, first * q * g, count * q * g);
    a.tokens = tokens;
    a.rows_out = rows;
    a.index_query = tensor_slice(w->prepare.index_query_out, first * q, count * q);
    a.index_weights = tensor_slice(w->prepare.index_weights_out, first * q, count * q);
    a.query = tensor_slice(w->prepare.query_out, first * q, count * q);
    a.gate = tensor_slice(a.gate, first * q, count * q);
    a.out = tensor_slice(a.out, first * q, count * q);
    a.lse = tensor_slice(a.lse, first * q, count * q);
    a.selected = tensor_slice(a.selected, first * q * g, count * q * g);
    return a;
}

static void run_stages(world *w, const csa_step_args *a)
{
    csa_score_args score = {.size = sizeof score,
                            .tokens = a->tokens,
                            .cache = a->cache,
                            .query = a->index_query,
                            .weights = a->index_weights,
                            .scores = tensor_slice(w->scores, 0, a->rows_out->current.shape[0]),
                            .rows_out = a->rows_out};
    csa_select_args select = {.size = sizeof select,
                              .scores = score.scores,
                              .current = a->rows_out->current,
                              .selected = a->selected,
                              .topk = a->topk};
    csa_attend_args attend = {.size = sizeof attend,
                              .tokens = a->tokens,
                              .cache = a->cache,
                              .rows = a->rows_out,
                              .query = a->query,
                              .selected = a->selected,
                              .gate = a->gate,
                              .out = a->out,
                              .lse = a->lse,
                              .scale = a->scale};
    CHECK_OK(csa_score(context, &score));
    CHECK_OK(csa_select(context, &select));
    CHECK_OK(csa_attend(context, &attend));
}

static void run_part(pair *p, bool prefill, bool stages)
{
    world *w = &p->w;
    int64_t first = prefill ? 0 : p->prefill, count = prefill ? p->prefill : w->shape.requests - p->prefill;
    int64_t q = w->shape.query_len;
    if (count == 0)
        return;
    csa_tokens tokens = requests_of(w, first, count);
    csa_rows rows;
    csa_step_args step = step_of(w, &tokens, &rows, first, count);
    csa_summarize_args summarize = world_summarize(w);
    summarize.tokens = &tokens;
    summarize.key = tensor_slice(summarize.key, first * q, count * q);
    summarize.z = tensor_slice(summarize.z, first * q, count * q);
    CHECK_OK(prefill ? csa_summarize_prefill(context, &summarize)
             : q > 1 ? csa_summarize_verify(context, &summarize)
                     : csa_summarize_decode(context, &summarize));
    if (stages)
        run_stages(w, &step);
    else
        CHECK_OK(prefill ? csa_prefill(context, p->plan, &step) : csa_decode(context, &step));
}

static void layer_is_its_parts(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(200); draw++) {
        test_set_draw(draw);
        csa_context *other = others[draw % 4];
        pair whole, parts;
        make_pair(&whole, (uint64_t)draw, other);
        make_pair(&parts, (uint64_t)draw, context);
        csa_layer_args layer = world_layer(&whole.w);
        CHECK_OK(csa_layer(other, whole.plan, &layer));
        CHECK_OK(csa_prepare(context, &parts.w.prepare));
        run_part(&parts, true, draw % 3 == 0);
        run_part(&parts, false, draw % 3 != 1);
        arena_expect_equal(&whole.w.memory, &parts.w.memory, "scores");
        end_pair(&whole);
        end_pair(&parts);
    }
}

/* Without a plan the first two stages may run as one; with many requests on several threads. */
static void layer_without_a_plan_is_its_parts(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(60); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 23);
        csa_context *other = others[draw % 4];
        world_shape shape = draw_shape(&r);
        shape.requests = RANDOM_OF(&r, 1, 2, 5, 30);
        world whole, parts;
        world_make(&whole, shape, (uint64_t)draw);
        world_make(&parts, shape, (uint64_t)draw);
        csa_layer_args layer = world_layer(&whole);
        CHECK_OK(csa_layer(other, NULL, &layer));
        csa_summarize_args summarize = world_summarize(&parts);
        csa_rows rows;
        csa_step_args step = step_of(&parts, &parts.step, &rows, 0, shape.requests);
        CHECK_OK(csa_prepare(context, &parts.prepare));
        CHECK_OK(shape.query_len > 1 ? csa_summarize_verify(context, &summarize)
                                     : csa_summarize_decode(context, &summarize));
        CHECK_OK(csa_decode(context, &step));
        arena_expect_equal(&whole.memory, &parts.memory, "scores");
        world_end(&whole);
        world_end(&parts);
    }
}

/* out may be the query's own memory; absent outputs change nothing in the others. */
static void outputs_are_optional(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(60); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 22);
        world w, twin;
        world_make(&w, draw_shape(&r), (uint64_t)draw);
        world_make(&twin, w.shape, (uint64_t)draw);
        csa_layer_args layer = world_layer(&w), bare = world_layer(&twin);
        CHECK_OK(csa_layer(context, NULL, &layer));
        bare.out = twin.prepare.query_out;
        bare.rows_out = NULL;
        bare.selected = bare.lse = (csa_tensor){0};
        twin.prepare.key_out = twin.prepare.value_out = (csa_tensor){0};
        CHECK_OK(csa_layer(context, NULL, &bare));
        tensor_expect_equal("out", &bare.out, &w.out);
        tensor_expect_equal("cache.kv", &twin.cache.kv, &w.cache.kv);
        tensor_expect_equal("cache.summaries", &twin.cache.summaries, &w.cache.summaries);
        tensor_expect_equal("cache.ring", &twin.cache.ring, &w.cache.ring);
        world_end(&w);
        world_end(&twin);
    }
}

/* No token, no request: nothing is done, and nothing complained about. */
static void nothing_is_legal(void **state)
{
    (void)state;
    world w;
    world_make(&w, (world_shape){.requests = 2}, 1);
    uint8_t *before = arena_snapshot(&w.memory);
    csa_tokens none = requests_of(&w, 0, 0);
    csa_rows rows;
    csa_step_args step = step_of(&w, &none, &rows, 0, 0);
    csa_plan *plan = NULL;
    csa_plan_args args = {.size = sizeof args, .regions = w.regions, .topk = w.shape.topk};
    CHECK_OK(csa_plan_prefill(context, &args, &plan));
    CHECK_OK(csa_decode(context, &step));
    CHECK_OK(csa_prefill(context, plan, &step));
    run_stages(&w, &step);
    CHECK(arena_unchanged(&w.memory, before));
    free(before);
    csa_plan_destroy(plan);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layer_is_its_parts),
        cmocka_unit_test(layer_without_a_plan_is_its_parts),
        cmocka_unit_test(outputs_are_optional),
        cmocka_unit_test(nothing_is_legal),
    };
    test_seed();
    return cmocka_run_group_tests(tests, make_contexts, end_contexts);
}

/*
 * Every id of every call is junk at once: whatever comes out, nothing is read or written outside the tensors,
 * and gaps stay as they were (the arena's guards, and the sanitizers, see to that). In checking mode such a
 * call may fail with a bad id, and then nothing was written. Calls that have no work at all do nothing.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "hostile.h"

/* ---- Junk --------------------------------------------------------------------------------------- */

/* limit: what the id should stay below. */
static int64_t junk(test_random *r, int64_t limit)
{
    const int64_t values[] = {INT64_MIN,
                              INT64_MAX,
                              INT64_MIN + 1,
                              INT64_MAX - 7,
                              -1,
                              0,
                              limit,
                              limit - 1,
                              limit + 1,
                              INT32_MAX,
                              INT32_MIN,
                              (int64_t)1 << 32,
                              ((int64_t)1 << 32) + 1,
                              -limit,
                              (int64_t)1 << 62,
                              INT64_MAX - limit};
    if (random_chance(r, 40))
        return random_between(r, 0, limit > 0 ? limit - 1 : 0);
    if (random_chance(r, 10))
        return (int64_t)random_bits(r);
    return values[random_between(r, 0, COUNT_OF(values) - 1)];
}

static void fill(csa_tensor *t, test_random *r, int64_t limit, int percent)
{
    for (int64_t i = 0; i < t->shape[0]; i++)
        for (int64_t j = 0; j < (t->ndim > 1 ? t->shape[1] : 1); j++) {
            int64_t value = junk(r, limit);
            void *element = tensor_at(t, i, j, 0, 0);
            if (!random_chance(r, percent))
                continue;
            if (t->dtype == CSA_I64)
                *(int64_t *)element = value;
            else if (t->dtype == CSA_I32)
                *(int32_t *)element = (int32_t)(uint32_t)(uint64_t)value;
            else
                *(uint8_t *)element = (uint8_t)value;
        }
}

/* A world whose tokens have all the ways of saying where they stand, junk in each. */
typedef struct junkyard {
    world w;
    csa_tensor metadata, row_active, row_positions;
    csa_rows rows;
    csa_plan *plan;
    int64_t bounds[64];
} junkyard;

static world_shape some_shape(test_random *r)
{
    return (world_shape){
        .groups = (int32_t)random_between(r, 1, 3),
        .heads = (int32_t)random_between(r, 1, 3),
        .index_heads = RANDOM_OF(r, 2, 4),
        .block_size = RANDOM_OF(r, 16, 32, 64, 128),
        .topk = RANDOM_OF(r, 1, 3, 8, 40),
        .requests = (int32_t)random_between(r, 1, 5),
        .query_len = RANDOM_OF(r, 1, 1, 2, 5),
        .kv_dtype = random_chance(r, 50) ? CSA_BF16 : CSA_E4M3,
        .max_length = 150,
        .strided = true,
        .inactive = random_chance(r, 50),
    };
}

static void add_ids(junkyard *y, test_random *r, int percent)
{
    world *w = &y->w;
    csa_tokens *k = &w->step;
    int tokens = (int)w->tokens, requests = w->shape.requests, rows = (int)w->rows;
    int64_t slots = w->blocks * w->shape.block_size;
    fill(&k->block_table, r, w->blocks, percent);
    fill(&k->slots, r, slots, percent);
    fill(&k->positions, r, 150, percent);
    fill(&k->ring_base, r, w->cache.ring.shape[0], percent);
    if (random_chance(r, 50)) {
        k->owners = arena_tensor(&w->memory, "owners", r, CSA_I64, 1, tokens);
        fill(&k->owners, r, requests, 100);
    }
    if (random_chance(r, 50)) {
        k->query_start = arena_tensor(&w->memory, "query_start", r, CSA_I32, 1, requests + 1);
        fill(&k->query_start, r, tokens, 100);
    }
    k->seq_lens = arena_tensor(&w->memory, "seq_lens", r, CSA_I32, 1, requests);
    fill(&k->seq_lens, r, 150, 100);
    if (random_chance(r, 50))
        k->positions = (csa_tensor){0};
    y->metadata = arena_tensor(&w->memory, "metadata", r, CSA_I64, 2, tokens, 10);
    fill(&y->metadata, r, random_chance(r, 50) ? 8 : slots / 8, 100);
    y->rows.size = sizeof y->rows;
    y->rows.active = arena_tensor(&w->memory, "row active", r, CSA_BOOL, 1, rows);
    y->rows.positions = arena_tensor(&w->memory, "row positions", r, CSA_I64, 1, rows);
    fill(&y->rows.active, r, 2, 100);
    fill(&y->rows.positions, r, 150, 100);
}

static void make_junkyard(junkyard *y, int draw)
{
    memset(y, 0, sizeof *y);
    test_random r = random_of(31, (uint64_t)draw);
    world_make(&y->w, some_shape(&r), 3000 + (uint64_t)draw);
    add_ids(y, &r, draw % 4 == 0 ? 100 : 30);
    tensor_randomise(&y->w.prepare.index_key_out, &r, 1);
    for (int i = 0; i < COUNT_OF(y->bounds); i++)
        y->bounds[i] = junk(&r, 150);
}

static void end_junkyard(junkyard *y)
{
    csa_plan_destroy(y->plan);
    world_end(&y->w);
}

/* ---- Every call --------------------------------------------------------------------------------- */

enum { CALLS = 14 };

/* A plan for the first requests, junk for bounds. */
static void plan_for(const csa_context *context, junkyard *y, int64_t requests)
{
    const world_shape *s = &y->w.shape;
    csa_plan_args args = {.size = sizeof args, .requests = requests};
    args.tokens = y->w.tokens ? requests * s->query_len : 0;
    args.positions = y->bounds;
    args.regions = y->w.regions;
    args.topk = s->topk;
    args.groups = s->groups;
    CHECK_OK(csa_plan_prefill(context, &args, &y->plan));
}

static csa_status prefill(const csa_context *context, junkyard *y)
{
    csa_step_args step = world_step(&y->w);
    plan_for(context, y, y->w.shape.requests);
    return csa_prefill(context, y->plan, &step);
}

/* Half of the requests are prefill. */
static csa_status mixed_layer(const csa_context *context, junkyard *y)
{
    csa_layer_args layer = world_layer(&y->w);
    const csa_tokens *k = &y->w.step;
    if (!k->positions.ndim || !k->query_start.ndim)
        return CSA_OK; /* a plan needs both */
    int64_t requests = y->w.tokens ? y->w.shape.requests / 2 : y->w.shape.requests;
    plan_for(context, y, requests);
    layer.metadata = tensor_slice(y->metadata, 0, y->w.tokens ? requests * y->w.shape.query_len : 0);
    return csa_layer(context, y->plan, &layer);
}

static csa_status call(const csa_context *context, junkyard *y, int number)
{
    world *w = &y->w;
    csa_summarize_args summarize = world_summarize(w), with = summarize;
    csa_score_args score = world_score(w);
    csa_select_args select = world_select(w);
    csa_attend_args attend = world_attend(w), placed = attend;
    csa_step_args step = world_step(w);
    csa_layer_args layer = world_layer(w);
    with.metadata = y->metadata;
    placed.rows = &y->rows;
    switch (number) {
    case 0:
        return csa_prepare(context, &w->prepare);
    case 1:
        return w->shape.query_len == 1 ? csa_summarize_decode(context, &summarize) : CSA_OK;
    case 2:
        return csa_summarize_verify(context, &summarize);
    case 3:
        return w->step.query_start.ndim ? csa_summarize_prefill(context, &with) : CSA_OK;
    case 4:
        return w->step.query_start.ndim ? csa_summarize_metadata(context, &with) : CSA_OK;
    case 5:
        return w->step.query_start.ndim ? csa_summarize_prefill(context, &summarize) : CSA_OK;
    case 6:
        return csa_score(context, &score);
    case 7:
        return csa_attend(context, &attend);
    case 8:
        return csa_attend(context, &placed);
    case 9:
        return csa_decode(context, &step);
    case 10:
        return csa_select(context, &select);
    case 11:
        return prefill(context, y);
    case 12:
        return mixed_layer(context, y);
    default:
        return csa_layer(context, NULL, &layer);
    }
}

/* Currents and lists are outputs of earlier calls: junk again for the calls that read them. */
static void spoil(junkyard *y, test_random *r, int number)
{
    if (number == 7)
        fill(&y->w.selected, r, y->w.regions, 70);
    if (number == 10)
        fill(&y->w.rows_out.current, r, y->w.regions, 70);
}

static void test_junk(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(300); draw++) {
        junkyard y;
        test_set_draw(draw);
        make_junkyard(&y, draw);
        test_random r = random_of(32, (uint64_t)draw);
        for (int number = 0; number < CALLS; number++) {
            spoil(&y, &r, number);
            CHECK_OK(call(serial_context(), &y, number));
        }
        end_junkyard(&y);
    }
}

static void test_junk_checked(void **state)
{
    (void)state;
    int refused = 0;
    for (int draw = 0; draw < test_draws(300); draw++) {
        junkyard y;
        test_set_draw(draw);
        make_junkyard(&y, draw);
        test_random r = random_of(33, (uint64_t)draw);
        csa_context *context = test_context((csa_context_options){.threads = 1, .check = true});
        for (int number = 0; number < CALLS; number++) {
            spoil(&y, &r, number);
            uint8_t *before = arena_snapshot(&y.w.memory);
            csa_status status = call(context, &y, number);
            CHECKF(status == CSA_OK || status == CSA_ERROR_ID, "call %d: %s", number, test_error());
            CHECKF(status == CSA_OK || arena_unchanged(&y.w.memory, before), "call %d wrote", number);
            refused += status != CSA_OK;
            free(before);
        }
        csa_context_destroy(context);
        end_junkyard(&y);
    }
    CHECK(refused > 0);
}

/* ---- Nothing to do ------------------------------------------------------------------------------ */

/* First extents of all that belongs to tokens become `tokens`; memory is taken away where there are none. */
static void cut(csa_tensor *t, int64_t extent)
{
    if (!t->ndim)
        return;
    t->shape[0] = extent;
    if (extent == 0)
        t->data = NULL;
}

static void cut_tokens(world *w)
{
    csa_prepare_args *p = &w->prepare;
    csa_tensor *all[] = {&w->step.slots,
                         &w->step.positions,
                         &w->index_query,
                         &w->index_weights,
                         &w->query,
                         &w->gate,
                         &w->scores,
                         &w->selected,
                         &w->out,
                         &w->lse,
                         &w->rows_out.active,
                         &w->rows_out.positions,
                         &w->rows_out.current,
                         &w->rows_out.lengths,
                         &w->rows_out.topk_lengths,
                         &p->index_query,
                         &p->index_key,
                         &p->index_weights,
                         &p->index_query_out,
                         &p->index_key_out,
                         &p->index_weights_out,
                         &p->query,
                         &p->key,
                         &p->value,
                         &p->query_out,
                         &p->key_out,
                         &p->value_out,
                         &w->z};
    for (int i = 0; i < COUNT_OF(all); i++)
        cut(all[i], 0);
    w->tokens = w->rows = 0;
    w->workspace = (csa_workspace){0}; /* no token needs none */
}

static void run_all(junkyard *y)
{
    uint8_t *before = arena_snapshot(&y->w.memory);
    for (int number = 0; number < CALLS; number++)
        CHECK_OK(call(checking_context(), y, number));
    CHECK(arena_unchanged(&y->w.memory, before));
    free(before);
}

static void test_no_tokens(void **state)
{
    (void)state;
    const int32_t starts[] = {0, 0, 0};
    for (int requests = 0; requests < 3; requests += 2) {
        junkyard y = {0};
        world_make(&y.w, (world_shape){.requests = 2}, 34);
        cut_tokens(&y.w);
        y.w.step.query_start = ids_i32(&y.w.memory, "query_start", requests + 1, starts);
        y.w.shape.requests = requests;
        cut(&y.w.step.block_table, requests);
        cut(&y.w.step.ring_base, requests);
        y.metadata = csa_tensor_2d(NULL, CSA_I64, 0, 10);
        y.rows = y.w.rows_out;
        run_all(&y);
        end_junkyard(&y);
    }
}

/* A table without columns, a cache without blocks, a step without regions: no token sees anything. */
static void test_no_cache(void **state)
{
    (void)state;
    for (int which = 0; which < 3; which++) {
        world w;
        world_make(&w, (world_shape){.requests = 2, .groups = 2, .topk = 1}, 35);
        csa_step_args step = world_step(&w);
        if (which == 0)
            w.step.block_table = csa_tensor_2d(NULL, CSA_I32, 2, 0);
        cut(&w.cache.kv, which == 1 ? 0 : w.blocks);
        cut(&w.cache.summaries, which == 1 ? 0 : w.blocks);
        if (which == 2) {
            w.step.block_table = csa_tensor_2d(NULL, CSA_I32, 2, 0);
            step.regions = 0; /* as the table says: none */
            step.selected.shape[1] = 1;
        }
        CHECK_OK(csa_decode(plain_context(), &step));
        for (int64_t t = 0; t < 2; t++)
            for (int64_t g = 0; g < 2; g++) {
                CHECK(tensor_value(&w.lse, t, g, 0, 0) == -INFINITY);
                for (int i = 0; i < CSA_HEAD_SIZE; i++)
                    CHECK(*(uint16_t *)tensor_at(&w.out, t, g, 0, i) == 0);
            }
        CHECK(which != 2 || *(int64_t *)tensor_at(&w.selected, 1, 0, 0, 0) == -1);
        world_end(&w);
    }
}

static void test_no_rows(void **state)
{
    (void)state;
    csa_select_args select = {.size = sizeof select};
    csa_gate_args gate = {.size = sizeof gate};
    select.scores = csa_tensor_2d(NULL, CSA_F32, 0, 1000);
    select.current = csa_tensor_1d(NULL, CSA_I64, 0);
    select.selected = csa_tensor_2d(NULL, CSA_I64, 0, 513);
    gate.attention = gate.out = csa_tensor_3d(NULL, CSA_BF16, 0, 4, CSA_HEAD_SIZE);
    gate.gate = csa_tensor_2d(NULL, CSA_BF16, 0, 4);
    CHECK_OK(csa_select(plain_context(), &select));
    CHECK_OK(csa_gate(plain_context(), &gate));
    csa_serving none = {.size = sizeof none};
    size_t bytes = 99;
    CHECK_OK(csa_workspace_size(NULL, &none, &bytes));
    CHECK(bytes == 0);
    CHECK_OK(csa_warm_up(plain_context(), &none, (csa_workspace){0}));
}

/* Rows without regions: there is no current one either. */
static void test_no_regions(void **state)
{
    (void)state;
    arena memory = {0};
    const int64_t currents[] = {0, -1, INT64_MAX};
    csa_select_args select = {.size = sizeof select};
    select.scores = csa_tensor_2d(NULL, CSA_F32, 3, 0);
    select.current = ids_i64(&memory, "current", 3, currents);
    select.selected = arena_tensor(&memory, "selected", NULL, CSA_I64, 2, 3, 1);
    tensor_set(&select.selected, 0);
    CHECK_OK(csa_select(plain_context(), &select));
    for (int64_t row = 0; row < 3; row++)
        CHECK(*(int64_t *)tensor_at(&select.selected, row, 0, 0, 0) == -1);
    arena_check(&memory);
    arena_free(&memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_junk),     cmocka_unit_test(test_junk_checked), cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_no_cache), cmocka_unit_test(test_no_rows),      cmocka_unit_test(test_no_regions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

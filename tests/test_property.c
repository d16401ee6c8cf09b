/*
 * What must not matter: how a request's tokens are cut into steps and of which kind, block size, strides,
 * padding, batch mates, score width, threads, scratch, and drafts that were rejected. Results must be the same
 * bits. SPDX-License-Identifier: Apache-2.0
 */
#include "story.h"

/* ---- Contexts ----------------------------------------------------------------------------------- */

static runner runners[] = {
    {{.threads = 1}, NULL},
    {{.threads = 2}, NULL},
    {{.threads = 7}, NULL},
    {{.threads = 7, .parallel_for = pool_for}, NULL},
    {{.threads = 3, .parallel_for = reverse_for}, NULL},
    {{.threads = 2, .parallel_for = pool_for, .scratch_limit = 1}, NULL}, /* one token at a time */
    {{.threads = 3, .scratch_limit = 6000, .check = true}, NULL},
};
enum { RUNNERS = sizeof runners / sizeof *runners };

static int make_runners(void **state)
{
    (void)state;
    for (int i = 0; i < RUNNERS; i++) {
        runners[i].options.size = sizeof runners[i].options;
        runners[i].context = test_context(runners[i].options);
    }
    return 0;
}

static int end_runners(void **state)
{
    (void)state;
    for (int i = 0; i < RUNNERS; i++)
        csa_context_destroy(runners[i].context);
    return 0;
}

/* ---- Shapes ------------------------------------------------------------------------------------- */

/* Multiplications of one telling's attention. */
static double cost(const story_shape *s)
{
    int64_t longest = s->prefix + s->tail, most = (int64_t)(s->topk + 1) * CSA_REGION;
    int64_t seen = longest < most ? longest : most;
    return (double)(s->requests * s->tail * s->groups * s->heads * seen) * CSA_KV_SIZE;
}

static story_shape draw_shape(test_random *r)
{
    story_shape s = {0};
    do {
        s.groups = (int32_t)random_between(r, 1, 8);
        s.heads = (int32_t)random_between(r, 1, 16);
        s.index_heads = RANDOM_OF(r, 2, 4);
        s.score_heads = RANDOM_OF(r, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 16);
        s.topk = RANDOM_OF(r, 1, 2, 3, 5, 8, 15, 40, 512);
        s.requests = (int32_t)random_between(r, 1, 4);
        s.rotary = RANDOM_OF(r, 0, 2, 64, 192);
        s.kv_dtype = random_chance(r, 50) ? CSA_BF16 : CSA_E4M3;
        s.prefix = random_between(r, 0, 1) * random_between(r, 1, 180);
        s.tail = random_between(r, 1, 24);
        s.ties = random_chance(r, 50);
        s.zero_centered = random_chance(r, 50);
        s.native_rope = random_chance(r, 50);
    } while (cost(&s) > 1.5e6);
    return s;
}

static telling_options draw_options(test_random *r, const story_shape *s)
{
    telling_options o = {
        .runner = &runners[random_between(r, 0, RUNNERS - 1)],
        .block_size = RANDOM_OF(r, 16, 32, 64, 128),
        .ring_capacity = random_between(r, 10, 14), /* enough for query_len 4 */
        .more_regions = random_chance(r, 30) ? -1 : random_between(r, 0, 9),
        .strided = random_chance(r, 50),
        .separate = s->score_heads || random_chance(r, 50),
        .stages = random_chance(r, 50),
        .padding = random_chance(r, 50),
        .metadata = random_chance(r, 50),
    };
    return o;
}

/* ---- Forms -------------------------------------------------------------------------------------- */

static void tell_somehow(telling *t, test_random *r, int form)
{
    switch (form) {
    case 0:
        telling_decode(t);
        break;
    case 1:
        telling_verify(t, (int32_t)random_between(r, 2, 4));
        break;
    case 2:
        telling_prefill(t, 1000);
        break;
    case 3:
        telling_prefill(t, random_between(r, 1, 12));
        break;
    default:
        telling_mixed(t);
    }
}

/* Decode token by token is what all else is compared with. */
static void forms_agree(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(200); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 1);
        story s;
        telling plain, other;
        story_make(&s, draw_shape(&r), (uint64_t)draw);
        telling_options options = {.runner = &runners[0], .block_size = 64, .ring_capacity = 8};
        options.separate = s.shape.score_heads != 0;
        telling_begin(&plain, &s, options, 0);
        telling_decode(&plain);
        for (int form = 0; form < 5; form++) {
            telling_begin(&other, &s, draw_options(&r, &s.shape), random_bits(&r));
            tell_somehow(&other, &r, form);
            telling_expect_equal(&other, &plain);
            telling_end(&other);
        }
        telling_end(&plain);
        story_end(&s);
    }
}

/* ---- Rejected drafts ---------------------------------------------------------------------------- */

/* One verify step of `drafts` drafts, of which `accepted` are right, from the first token of each tail on; the
 * next steps go on behind them. */
static void speculate(telling *t, int32_t drafts, int32_t accepted)
{
    story_part parts[8];
    int32_t requests = t->story->shape.requests;
    for (int32_t r = 0; r < requests; r++)
        parts[r] = (story_part){r, t->story->prefix[r], drafts + 1, drafts - accepted};
    telling_step(t, parts, requests, 0, drafts + 1);
    for (int32_t r = 0; r < requests; r++)
        t->done[r] = t->story->prefix[r] + 1 + accepted;
}

/* Requests that stand at every position mod 8; the ring has exactly 7 + drafts rows. */
static void check_drafts(int32_t drafts, int32_t accepted, csa_dtype kv_dtype, uint64_t number)
{
    story s;
    telling plain, other;
    story_shape shape = {
        .groups = 1, .heads = 1, .index_heads = 2, .topk = 2, .requests = 8, .kv_dtype = kv_dtype};
    shape.prefix = 40;
    shape.every_offset = true;
    shape.tail = 12;
    story_make(&s, shape, number);
    telling_options options = {.runner = &runners[0], .block_size = 16, .ring_capacity = 8};
    telling_begin(&plain, &s, options, 0);
    options.ring_capacity = 7 + drafts;
    options.runner = &runners[number % RUNNERS];
    telling_begin(&other, &s, options, 1);
    speculate(&other, drafts, accepted);
    story_part next[8];
    for (int64_t step = 0; step < shape.tail; step++) {
        for (int64_t r = 0; r < 8; r++)
            next[r] = (story_part){r, s.prefix[r] + step, 1, 0};
        telling_step(&plain, next, 8, 0, 1);
        if (step > accepted)
            telling_step(&other, next, 8, 0, 1);
    }
    telling_expect_equal(&other, &plain);
    telling_end(&other);
    telling_end(&plain);
    story_end(&s);
}

static void rejected_drafts_leave_no_trace(void **state)
{
    (void)state;
    const int32_t drafts[] = {1, 3, 6};
    uint64_t number = 0;
    for (int i = 0; i < 3; i++)
        for (int32_t accepted = 0; accepted <= drafts[i]; accepted++) {
            test_set_draw((int64_t)number);
            check_drafts(drafts[i], accepted, number % 2 ? CSA_E4M3 : CSA_BF16, number);
            number++;
        }
}

/* Verify after verify, never all accepted, down to the end. */
static void speculation_all_the_way(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(20); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 2);
        story_shape shape = {.groups = 2, .heads = 2, .index_heads = 4, .topk = 3, .requests = 3, .ties = true};
        shape.kv_dtype = CSA_BF16;
        shape.prefix = 50;
        shape.tail = 30;
        int32_t drafts = RANDOM_OF(&r, 1, 3, 6);
        story s;
        telling plain, other;
        story_make(&s, shape, (uint64_t)draw);
        telling_options options = {.runner = &runners[0], .block_size = 16, .ring_capacity = 7 + drafts};
        telling_begin(&plain, &s, options, 0);
        telling_decode(&plain);
        telling_begin(&other, &s, options, 1);
        for (int64_t told = 0; told + drafts < shape.tail;) {
            story_part parts[3];
            int64_t accepted = random_between(&r, 0, drafts);
            for (int64_t q = 0; q < 3; q++)
                parts[q] = (story_part){q, s.prefix[q] + told, drafts + 1, drafts - accepted};
            telling_step(&other, parts, 3, 0, drafts + 1);
            told += 1 + accepted;
            for (int64_t q = 0; q < 3; q++)
                other.done[q] = s.prefix[q] + told;
        }
        telling_decode(&other);
        telling_expect_equal(&other, &plain);
        telling_end(&other);
        telling_end(&plain);
        story_end(&s);
    }
}

/* ---- Batch mates -------------------------------------------------------------------------------- */

/* The first requests of a world, as a decode step with outputs of its own in `memory`. */
static csa_step_args first_requests(world *w, csa_tokens *tokens, int64_t requests, arena *memory)
{
    csa_step_args a = world_step(w);
    int64_t count = requests * w->shape.query_len, rows = count * w->shape.groups;
    *tokens = w->step;
    tokens->block_table = tensor_slice(tokens->block_table, 0, requests);
    tokens->ring_base = tensor_slice(tokens->ring_base, 0, requests);
    tokens->slots = tensor_slice(tokens->slots, 0, count);
    tokens->positions = tensor_slice(tokens->positions, 0, count);
    a.tokens = tokens;
    a.rows_out = NULL;
    a.index_query = tensor_slice(a.index_query, 0, count);
    a.index_weights = tensor_slice(a.index_weights, 0, count);
    a.query = tensor_slice(a.query, 0, count);
    a.gate = tensor_slice(a.gate, 0, count);
    a.lse = arena_tensor(memory, "lse", NULL, CSA_F32, 3, (int)count, w->shape.groups, w->shape.heads);
    a.out = arena_tensor(memory, "out", NULL, CSA_BF16, 4, (int)count, w->shape.groups, w->shape.heads,
                         CSA_HEAD_SIZE);
    a.selected =
        arena_tensor(memory, "selected", NULL, CSA_I64, 2, (int)rows, (int)world_step(w).selected.shape[1]);
    return a;
}

static void expect_same_start(const csa_tensor *few, const csa_tensor *many, const char *name)
{
    csa_tensor start = tensor_slice(*many, 0, few->shape[0]);
    tensor_expect_equal(name, &start, few);
}

static void batch_mates_do_not_matter(void **state)
{
    (void)state;
    const int64_t batches[] = {1, 9, 65, 129};
    for (int draw = 0; draw < test_draws(12); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 3);
        world_shape shape = {.requests = 129, .max_length = 90, .inactive = draw % 2, .strided = draw % 3 == 0};
        shape.groups = RANDOM_OF(&r, 1, 2, 3);
        shape.heads = RANDOM_OF(&r, 1, 2);
        shape.query_len = RANDOM_OF(&r, 1, 1, 2);
        shape.kv_dtype = draw % 2 ? CSA_E4M3 : CSA_BF16;
        world w;
        world_make(&w, shape, (uint64_t)draw);
        csa_step_args steps[4];
        for (int i = 0; i < 4; i++) {
            csa_tokens tokens;
            steps[i] = first_requests(&w, &tokens, batches[i], &w.memory);
            CHECK_OK(csa_decode(runners[random_between(&r, 0, 3)].context, &steps[i]));
        }
        for (int i = 0; i < 3; i++) {
            expect_same_start(&steps[i].selected, &steps[3].selected, "selected");
            expect_same_start(&steps[i].out, &steps[3].out, "out");
            expect_same_start(&steps[i].lse, &steps[3].lse, "lse");
        }
        world_end(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms_agree),
        cmocka_unit_test(rejected_drafts_leave_no_trace),
        cmocka_unit_test(speculation_all_the_way),
        cmocka_unit_test(batch_mates_do_not_matter),
    };
    test_seed();
    return cmocka_run_group_tests(tests, make_runners, end_runners);
}

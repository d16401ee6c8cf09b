/*
 * Checking mode: each bad id, length or position is refused by name before anything is written; the ids of
 * padding are not looked at. Without it the same calls succeed and stay in bounds.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "calls.h"

static csa_context *strict, *loose;

static int make_contexts(void **state)
{
    (void)state;
    strict = test_context((csa_context_options){.threads = 2, .check = true});
    loose = test_context((csa_context_options){.threads = 2});
    return 0;
}

static int end_contexts(void **state)
{
    (void)state;
    csa_context_destroy(strict);
    csa_context_destroy(loose);
    return 0;
}

/* Which id tensor is hit. */
enum { TABLE, SLOT, POSITION, OWNER, SEQ_LEN, START, RING, CURRENT, SELECTED, ROW_POSITION };
enum { PAST_END = -99 }; /* the first block, or slot, behind the cache */

typedef struct bad_id {
    int calls[8]; /* which must refuse it; 0 ends */
    int tensor;
    int64_t i, j, value;
    const char *text;
} bad_id;

enum { P = CSA_OP_PREPARE, SD, SV, SP, SM, SC, SE, AT, GA, DE, PR, LA, LP = CALL_LAYER_PLAN };

/* Four requests of 60 tokens, one new token each at position 59; blocks of 16; topk 4; 2 groups. */
static const bad_id bad_ids[] = {
    {{SC, AT, DE, PR, LA, LP}, TABLE, 2, 1, -1, "tokens.block_table[2, 1] is -1, expected 0 to"},
    {{SC, AT, DE, PR, LA, LP}, TABLE, 0, 3, 1 << 20, "tokens.block_table[0, 3] is 1048576, expected 0 to"},
    {{SC, AT, DE, PR, LA, LP},
     TABLE,
     3,
     0,
     INT32_MIN,
     "tokens.block_table[3, 0] is -2147483648, expected 0 to"},
    {{SC, DE, PR, LA, LP}, OWNER, 1, 0, 4, "owner of token[1] is 4, expected 0 to 3"},
    {{SC, DE, PR, LA, LP}, OWNER, 2, 0, -1, "owner of token[2] is -1, expected 0 to 3"},
    {{AT}, OWNER, 2, 0, 77, "owner of token[2] is 77, expected 0 to 3"},
    {{P, SD, SV, SP, LA, LP}, SLOT, 1, 0, 1 << 20, "tokens.slots[1] is 1048576, expected 0 to"},
    {{SC, AT, DE, PR, LA, LP}, TABLE, 1, 2, PAST_END, "tokens.block_table[1, 2] is"},
    {{P, SD, SV, SP, LA, LP}, SLOT, 3, 0, PAST_END, "tokens.slots[3] is"},
    {{P, SD, SV, SP, LA, LP}, SLOT, 3, 0, INT64_MAX, "tokens.slots[3] is 9223372036854775807, expected 0 to"},
    {{SD, SV, SP, LA, LP},
     SLOT,
     2,
     0,
     3,
     "tokens.slots[2] is 3, offset 3 of its block, but position 59 has 11"},
    {{P, LA, LP}, POSITION, 1, 0, 1 << 20, "position of token[1] is 1048576, expected 0 to"},
    {{SC, DE, PR}, POSITION, 1, 0, 10000, "tokens.positions[1] is 10000, but tokens.seq_lens[1] puts it at 59"},
    {{SD, SV, SC, DE}, SEQ_LEN, 2, 0, 99, "tokens.positions[2] is 59, but tokens.seq_lens[2] puts it at 98"},
    {{SD, SV, SP, SC, DE, PR, LA, LP}, SEQ_LEN, 2, 0, -1, "tokens.seq_lens[2] is -1, expected 0 to"},
    {{SP, SM, LP}, START, 2, 0, 9, "tokens.query_start[2] is 9, expected 1 to 4"},
    {{SP, SM, LP}, START, 2, 0, 0, "tokens.query_start[2] is 0, expected 1 to 4"},
    {{SP, SM, LP}, START, 0, 0, -1, "tokens.query_start[0] is -1, expected 0 to 4"},
    {{SD, SV, SP, LA, LP}, RING, 1, 0, 28, "tokens.ring_base[1] is 28, expected 0 to 27"},
    {{SD, SV, SP, LA, LP},
     RING,
     0,
     0,
     INT64_MAX,
     "tokens.ring_base[0] is 9223372036854775807, expected 0 to 27"},
    {{SE}, CURRENT, 5, 0, 100, "current[5] is 100, expected -1 to"},
    {{SE}, CURRENT, 5, 0, -2, "current[5] is -2, expected -1 to"},
    {{AT}, SELECTED, 3, 1, -1, "selected[3, 1] is -1, expected 0 to 7 in the last 5 entries"},
    {{AT}, SELECTED, 3, 2, 8, "selected[3, 2] is 8, expected 0 to 7"},
    {{AT}, ROW_POSITION, 4, 0, -5, "position of row[4] is -5, expected 0 to"},
    {{AT}, ROW_POSITION, 4, 0, 10000, "position 10000 of request 2 needs 626 columns"},
};

static csa_tensor *tensor_of(calls *c, int which)
{
    csa_tensor *all[] = {&c->w.step.block_table,  &c->w.step.slots,       &c->w.step.positions,
                         &c->w.step.owners,       &c->w.step.seq_lens,    &c->w.step.query_start,
                         &c->w.step.ring_base,    &c->w.rows_out.current, &c->w.selected,
                         &c->w.rows_out.positions};
    return all[which];
}

static void put_id(calls *c, const bad_id *bad)
{
    csa_tensor *t = tensor_of(c, bad->tensor);
    int64_t value = bad->value;
    if (value == PAST_END)
        value = c->w.blocks * (bad->tensor == SLOT ? c->w.shape.block_size : 1);
    if (t->dtype == CSA_I32)
        *(int32_t *)tensor_at(t, bad->i, bad->j, 0, 0) = (int32_t)value;
    else
        *(int64_t *)tensor_at(t, bad->i, bad->j, 0, 0) = value;
}

static world_shape shape(void)
{
    return (world_shape){.groups = 2, .heads = 2, .requests = 4, .exact_length = 60};
}

static void bad_ids_are_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_ids / sizeof *bad_ids; i++)
        for (int n = 0; n < 8 && bad_ids[i].calls[n]; n++) {
            int call = bad_ids[i].calls[n];
            test_set_draw((int64_t)i);
            calls c;
            calls_make(&c, strict, shape());
            calls_link(&c);
            put_id(&c, &bad_ids[i]);
            if (call == LA) /* its decode form counts tokens */
                c.w.step.query_start = (csa_tensor){0};
            uint8_t *before = arena_snapshot(&c.w.memory);
            csa_status status = calls_run(&c, strict, call);
            CHECKF(status == CSA_ERROR_ID, "%s, %s: status %s, text %s", calls_name(call), bad_ids[i].text,
                   csa_status_name(status), test_error());
            CHECKF(strstr(test_error(), bad_ids[i].text) && strstr(test_error(), calls_name(call)),
                   "\"%s\", expected \"%s\"", test_error(), bad_ids[i].text);
            CHECKF(arena_unchanged(&c.w.memory, before), "%s: something was written", test_error());
            if (call <= CSA_OP_LAYER) /* which does not look at ids */
                CHECK_OK(csa_supported(strict, (csa_op)call, calls_args(&c, call)));
            free(before);
            calls_end(&c);
        }
}

/* The same without checking, everywhere: bounds are kept (guards, gaps and the sanitizers watch). */
static void bad_ids_are_harmless(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_ids / sizeof *bad_ids; i++)
        for (int call = 1; call <= CALLS; call++) {
            test_set_draw((int64_t)i);
            calls c;
            world_shape strided = shape();
            strided.strided = i % 2;
            strided.kv_dtype = i % 3 ? CSA_BF16 : CSA_E4M3;
            calls_make(&c, loose, strided);
            calls_link(&c);
            put_id(&c, &bad_ids[i]);
            if (call == LA)
                c.w.step.query_start = (csa_tensor){0};
            CHECK_OK(calls_run(&c, loose, call));
            calls_end(&c);
        }
}

/* Ids full of random bits, in all tensors at once. */
static void random_ids_are_harmless(void **state)
{
    (void)state;
    for (int draw = 0; draw < test_draws(300); draw++) {
        test_set_draw(draw);
        test_random r = random_of((uint64_t)draw, 41);
        calls c;
        world_shape some = shape();
        some.query_len = draw % 3 == 0 ? 1 : 2;
        some.strided = draw % 2;
        calls_make(&c, loose, some);
        calls_link(&c);
        for (int which = TABLE; which <= ROW_POSITION; which++) {
            csa_tensor *t = tensor_of(&c, which);
            bool wild = random_chance(&r, 50);
            for (int64_t i = 0; i < t->shape[0]; i++)
                for (int64_t j = 0; j < (t->ndim > 1 ? t->shape[1] : 1); j++) {
                    bad_id one = {.tensor = which, .i = i, .j = j};
                    one.value = wild ? (int64_t)random_bits(&r) : random_between(&r, -3, 70);
                    if (random_chance(&r, 50))
                        put_id(&c, &one);
                }
        }
        int call = (int)random_between(&r, 1, CALLS);
        if (call == SD && some.query_len > 1)
            call = SV;
        if (call == LA)
            c.w.step.query_start = (csa_tensor){0};
        c.chunk.metadata =
            random_chance(&r, 50) ? c.runs : c.chunk.metadata; /* runs of -1, or of random tokens */
        for (int64_t i = 0; random_chance(&r, 50) && i < 8; i++)
            *(int64_t *)tensor_at(&c.runs, random_between(&r, 0, c.w.tokens - 1), random_between(&r, 0, 9), 0,
                                  0) = random_between(&r, -2, 12);
        CHECK_OK(calls_run(&c, loose, call));
        calls_end(&c);
    }
}

static void refused_with(calls *c, int call, const char *text)
{
    uint8_t *before = arena_snapshot(&c->w.memory);
    CHECK(calls_run(c, strict, call) == CSA_ERROR_ID);
    CHECKF(strstr(test_error(), text), "\"%s\", expected \"%s\"", test_error(), text);
    CHECKF(arena_unchanged(&c->w.memory, before), "%s: something was written", test_error());
    free(before);
    calls_end(c);
}

/* Ids that are all in range, but contradict each other. */
static void contradictions_are_named(void **state)
{
    (void)state;
    calls c;
    calls_make(&c, strict, shape());
    c.w.step.seq_lens = (csa_tensor){0};
    *(int64_t *)tensor_at(&c.w.step.positions, 1, 0, 0, 0) = 10000;
    refused_with(&c, SC, "tokens.positions[1] is 10000: token 1 stands in region 1250, expected 0 to");

    calls_make(&c, strict, shape());
    c.w.step.positions = (csa_tensor){0};
    *(int32_t *)tensor_at(&c.w.step.seq_lens, 3, 0, 0, 0) = 10000;
    refused_with(&c, DE, "tokens.seq_lens[3] is 10000: token 3 stands in region 1249, expected 0 to");

    calls_make(&c, strict, shape());
    int64_t *slot = tensor_at(&c.w.step.slots, 2, 0, 0, 0);
    *slot = *slot >= 16 ? *slot - 16 : *slot + 16; /* the neighbouring block */
    refused_with(&c, SD, "but the block table has block");

    world_shape two = shape();
    two.query_len = 2;
    calls_make(&c, strict, two);
    c.w.step.seq_lens = (csa_tensor){0};
    *(int64_t *)tensor_at(&c.w.step.positions, 1, 0, 0, 0) += 16;
    c.w.step.block_table = (csa_tensor){0};
    refused_with(&c, SP, "token 1 stands at");
}

/* Every id of an inactive token may be anything: checking calls accept it, and nothing but the others' rows is
 * written. */
static void padding_is_not_looked_at(void **state)
{
    (void)state;
    for (int call = 1; call <= CALLS; call++)
        for (int by_slot = 0; by_slot < 2; by_slot++) {
            test_set_draw(call);
            calls c;
            calls_make(&c, strict, shape());
            calls_link(&c);
            *(int64_t *)tensor_at(&c.w.step.slots, 2, 0, 0, 0) = by_slot ? -1 : INT64_MAX;
            *(int64_t *)tensor_at(&c.w.step.positions, 2, 0, 0, 0) = by_slot ? INT32_MAX : -7;
            *(int64_t *)tensor_at(&c.w.step.ring_base, 2, 0, 0, 0) = INT64_MAX;
            if (call != AT && call != GA && call != SE) /* owners decide in what order rows stand */
                *(int64_t *)tensor_at(&c.w.step.owners, 2, 0, 0, 0) = 1 << 20;
            csa_tensor row = tensor_slice(c.w.step.block_table, 2, 1);
            tensor_set(&row, 0x7F);
            for (int64_t g = 4; g < 6; g++) {
                csa_tensor list = tensor_slice(c.w.selected, g, 1);
                tensor_set(&list, 0x7F);
                *(uint8_t *)tensor_at(&c.w.rows_out.active, g, 0, 0, 0) = 0;
                *(int64_t *)tensor_at(&c.w.rows_out.positions, g, 0, 0, 0) = INT64_MIN;
            }
            if (call == LA)
                c.w.step.query_start = (csa_tensor){0};
            CHECK_OK(calls_run(&c, strict, call));
            calls_end(&c);
        }
}

/* What is absent is not asked for. */
static void checking_does_without_optional_tensors(void **state)
{
    (void)state;
    for (int call = 1; call <= CALLS; call++) {
        test_set_draw(call);
        calls c;
        calls_make(&c, strict, shape());
        calls_link(&c);
        CHECK_OK(calls_run(&c, strict, call));
        csa_tokens *k = &c.w.step;
        bool starts = call == SP || call == SM || call == LP;
        k->owners = k->ring_base = c.w.cache.ring = (csa_tensor){0};
        k->query_start = starts ? k->query_start : (csa_tensor){0};
        if (call == LP)
            k->seq_lens = (csa_tensor){0};
        else
            k->positions = (csa_tensor){0};
        if (call == SC || call == AT || call == DE || call == PR)
            k->slots = (csa_tensor){0};
        c.attend.rows = NULL;
        CHECK_OK(calls_run(&c, strict, call));
        calls_end(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_ids_are_named),        cmocka_unit_test(contradictions_are_named),
        cmocka_unit_test(bad_ids_are_harmless),     cmocka_unit_test(random_ids_are_harmless),
        cmocka_unit_test(padding_is_not_looked_at), cmocka_unit_test(checking_does_without_optional_tensors),
    };
    test_seed();
    return cmocka_run_group_tests(tests, make_contexts, end_contexts);
}

/*
 * Offsets past 2^31 and 2^32, in bytes and in elements: sparse mappings of which only a few pages are touched
 * hold the same numbers as a small world, and every result must be the same.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "hostile.h"

#include <errno.h>
#include <sys/mman.h>

/* ---- Sparse memory ------------------------------------------------------------------------------ */

typedef struct sparse {
    void *data;
    size_t bytes;
} sparse;

/* False, and says why, if the system does not lend so much address space. */
static bool reserve(sparse *s, int64_t bytes)
{
    s->bytes = (size_t)bytes + 4096;
    s->data = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s->data != MAP_FAILED) {
        madvise(s->data, s->bytes, MADV_NOHUGEPAGE); /* touch no more than needed; may fail */
        return true;
    }
    print_message("skipped: %zu bytes of sparse memory were refused: %s\n", s->bytes, strerror(errno));
    return false;
}

static void release(sparse *s)
{
    munmap(s->data, s->bytes);
}

/* Where the system does not lend what all of a test's mappings take, it is skipped before it allocates. */
static void skip_unless_possible(void)
{
    sparse all;
    if (!reserve(&all, (int64_t)1 << 38))
        skip();
    release(&all);
}

/* Moves a tensor to sparse memory in which its first extent's stride is at least this many elements, and those
 * of further ones (but the last) a 32nd of the one before. */
static bool spread(csa_tensor *t, int64_t stride, sparse *s)
{
    csa_tensor moved = *t;
    for (int d = 0; d < t->ndim - (t->ndim > 1); d++, stride /= 32)
        moved.stride[d] = stride + (t->dtype == CSA_E4M3 ? 24 : 8);
    int64_t last = 0;
    for (int d = 0; d < t->ndim; d++)
        last += (t->shape[d] - 1) * moved.stride[d];
    if (!reserve(s, (last + 1) * tensor_itemsize(t->dtype)))
        return false;
    moved.data = s->data;
    tensor_copy(&moved, t);
    *t = moved;
    return true;
}

/* ---- Every tensor of a layer, one at a time ----------------------------------------------------- */

typedef struct named {
    const char *name;
    csa_tensor *tensor;
} named;

enum { TENSORS = 36 };

static void list_tensors(world *w, named list[TENSORS])
{
    csa_prepare_args *p = &w->prepare;
    const named all[TENSORS] = {
        {"kv", &w->cache.kv},
        {"summaries", &w->cache.summaries},
        {"ring", &w->cache.ring},
        {"block_table", &w->step.block_table},
        {"slots", &w->step.slots},
        {"positions", &w->step.positions},
        {"ring_base", &w->step.ring_base},
        {"z", &w->z},
        {"gate", &w->gate},
        {"out", &w->out},
        {"lse", &w->lse},
        {"selected", &w->selected},
        {"rows.active", &w->rows_out.active},
        {"rows.positions", &w->rows_out.positions},
        {"rows.current", &w->rows_out.current},
        {"rows.lengths", &w->rows_out.lengths},
        {"rows.topk_lengths", &w->rows_out.topk_lengths},
        {"index_query", &p->index_query},
        {"index_key", &p->index_key},
        {"index_weights", &p->index_weights},
        {"index_query_norm", &p->index_query_norm},
        {"index_key_norm", &p->index_key_norm},
        {"index_key_bias", &p->index_key_bias},
        {"index_rope", &p->index_rope},
        {"index_query_out", &p->index_query_out},
        {"index_key_out", &p->index_key_out},
        {"index_weights_out", &p->index_weights_out},
        {"query", &p->query},
        {"key", &p->key},
        {"value", &p->value},
        {"query_norm", &p->query_norm},
        {"key_norm", &p->key_norm},
        {"rope", &p->rope},
        {"query_out", &p->query_out},
        {"key_out", &p->key_out},
        {"value_out", &p->value_out},
    };
    memcpy(list, all, sizeof all);
}

/* Long vectors (norm weights, table rows) would touch a page for every element, and a GPU's memory is not
 * sparse: a smaller stride will do, the last element lies past 2^31 all the same. */
static int64_t stride_for(const csa_tensor *t)
{
    int64_t past = ((int64_t)1 << 31) + 5, few = test_on_cuda() ? 2 : 16;
    return t->shape[0] > few ? past * 2 / t->shape[0] : past;
}

static void run_layer(world *w)
{
    csa_layer_args layer = world_layer(w);
    CHECK_OK(csa_layer(plain_context(), NULL, &layer));
}

static void test_far_tensors(void **state)
{
    (void)state;
    skip_unless_possible();
    world_shape shape = {
        .requests = 3, .query_len = 2, .groups = 2, .heads = 2, .max_length = 60, .rotary = 32};
    world small;
    named expected[TENSORS], got[TENSORS];
    world_make(&small, shape, 10000);
    run_layer(&small);
    list_tensors(&small, expected);
    for (int i = 0; i < TENSORS; i++) {
        world far;
        sparse memory;
        world_make(&far, shape, 10000);
        list_tensors(&far, got);
        test_set_draw(i);
        CHECK(spread(got[i].tensor, stride_for(got[i].tensor), &memory));
        run_layer(&far);
        for (int j = 0; j < TENSORS; j++)
            tensor_expect_equal(got[j].name, got[j].tensor, expected[j].tensor);
        release(&memory);
        world_end(&far);
    }
    world_end(&small);
}

/* ---- Scores and lists --------------------------------------------------------------------------- */

static void test_far_scores(void **state)
{
    (void)state;
    skip_unless_possible();
    world small, far;
    sparse scores, lists, current;
    world_make(&small, (world_shape){.requests = 2, .groups = 2, .exact_length = 90, .topk = 3}, 10100);
    world_make(&far, small.shape, 10100);
    int64_t stride = ((int64_t)1 << 31) + 1;
    CHECK(spread(&far.scores, stride, &scores) && spread(&far.selected, stride, &lists) &&
          spread(&far.rows_out.current, stride, &current));
    world *worlds[] = {&small, &far};
    for (int i = 0; i < 2; i++) {
        csa_score_args score = world_score(worlds[i]);
        csa_select_args select = world_select(worlds[i]);
        csa_attend_args attend = world_attend(worlds[i]);
        CHECK_OK(csa_score(plain_context(), &score));
        CHECK_OK(csa_select(plain_context(), &select));
        CHECK_OK(csa_attend(plain_context(), &attend));
    }
    tensor_expect_equal("scores", &far.scores, &small.scores);
    tensor_expect_equal("selected", &far.selected, &small.selected);
    tensor_expect_equal("out", &far.out, &small.out);
    release(&scores);
    release(&lists);
    release(&current);
    world_end(&small);
    world_end(&far);
}

/* ---- Numbers that are large themselves ---------------------------------------------------------- */

/* Moves a cache tensor to the end of one with so many more blocks (or rows). */
static bool lift(csa_tensor *t, int64_t more, sparse *s)
{
    csa_tensor large = *t;
    large.shape[0] += more;
    if (!reserve(s, large.shape[0] * t->stride[0] * tensor_itemsize(t->dtype)))
        return false;
    large.data = s->data;
    csa_tensor end = tensor_slice(large, more, t->shape[0]);
    tensor_copy(&end, t);
    *t = large;
    return true;
}

/* A cache of 10 GB without gaps, whose last blocks are used. */
static void test_high_blocks(void **state)
{
    (void)state;
    skip_unless_possible();
    for (int e4m3 = 0; e4m3 < 2; e4m3++) {
        world small, far;
        sparse kv, summaries, ring;
        world_shape shape = {.requests = 2, .query_len = 3, .groups = 2, .block_size = 32, .max_length = 100};
        shape.kv_dtype = e4m3 ? CSA_E4M3 : CSA_BF16;
        world_make(&small, shape, 10200);
        world_make(&far, shape, 10200);
        int64_t more = 400000 / (2 - e4m3); /* times 2 * 32 * 384 elements */
        CHECK(lift(&far.cache.kv, more, &kv) && lift(&far.cache.summaries, more, &summaries) &&
              lift(&far.cache.ring, 9000000, &ring));
        for (int64_t r = 0; r < 2; r++) {
            *(int64_t *)tensor_at(&far.step.ring_base, r, 0, 0, 0) += 9000000;
            for (int64_t column = 0; column * 32 < far.lengths[r]; column++)
                *(int32_t *)tensor_at(&far.step.block_table, r, column, 0, 0) += (int32_t)more;
        }
        for (int64_t t = 0; t < far.tokens; t++)
            *(int64_t *)tensor_at(&far.step.slots, t, 0, 0, 0) += more * 32;
        run_layer(&small);
        run_layer(&far);
        csa_tensor part = tensor_slice(far.cache.kv, more, small.blocks);
        tensor_expect_equal("out", &far.out, &small.out);
        tensor_expect_equal("kv", &part, &small.cache.kv);
        part = tensor_slice(far.cache.summaries, more, small.blocks);
        tensor_expect_equal("summaries", &part, &small.cache.summaries);
        part = tensor_slice(far.cache.ring, 9000000, small.cache.ring.shape[0]);
        tensor_expect_equal("ring", &part, &small.cache.ring);
        release(&kv);
        release(&summaries);
        release(&ring);
        world_end(&small);
        world_end(&far);
    }
}

/* Slots past 2^31: 2^24 blocks of 128 tokens, their summaries alone (64 GB). */
static void test_high_slots(void **state)
{
    (void)state;
    skip_unless_possible();
    world small, far;
    sparse memory;
    world_make(&small, (world_shape){.requests = 3, .exact_length = 64, .block_size = 128}, 10300);
    world_make(&far, small.shape, 10300);
    int64_t more = ((int64_t)1 << 24) + 3;
    CHECK(lift(&far.cache.summaries, more, &memory));
    far.cache.kv = (csa_tensor){0};
    for (int64_t t = 0; t < 3; t++)
        *(int64_t *)tensor_at(&far.step.slots, t, 0, 0, 0) += more * 128;
    csa_summarize_args a = world_summarize(&small), b = world_summarize(&far);
    CHECK_OK(csa_summarize_decode(plain_context(), &a));
    CHECK_OK(csa_summarize_decode(plain_context(), &b));
    csa_tensor part = tensor_slice(far.cache.summaries, more, small.blocks);
    tensor_expect_equal("summaries", &part, &small.cache.summaries);
    release(&memory);
    world_end(&small);
    world_end(&far);
}

/* A table of 2^32 columns (16 GB): positions past 2^36. */
static void test_high_columns(void **state)
{
    (void)state;
    skip_unless_possible();
    const int64_t columns = ((int64_t)1 << 32) + 8, first = columns - 8;
    world small, far;
    sparse memory;
    world_make(&small, (world_shape){.exact_length = 100, .groups = 2, .topk = 5}, 10400);
    world_make(&far, small.shape, 10400);
    CHECK(reserve(&memory, columns * 4));
    far.step.block_table = csa_tensor_2d(memory.data, CSA_I32, 1, columns);
    for (int64_t column = 0; column < 7; column++)
        memcpy(tensor_at(&far.step.block_table, 0, first + column, 0, 0),
               tensor_at(&small.step.block_table, 0, column, 0, 0), 4);
    *(int64_t *)far.step.positions.data += first * 16;
    csa_score_args score = world_score(&small);
    csa_select_args select = world_select(&small);
    csa_attend_args a = world_attend(&small), b = world_attend(&far);
    CHECK_OK(csa_score(plain_context(), &score));
    CHECK_OK(csa_select(plain_context(), &select));
    for (int64_t row = 0; row < 2; row++)
        for (int64_t i = 0; i < 6; i++)
            *(int64_t *)tensor_at(&far.selected, row, i, 0, 0) =
                *(int64_t *)tensor_at(&small.selected, row, i, 0, 0) + first * 2;
    CHECK_OK(csa_attend(plain_context(), &a));
    CHECK_OK(csa_attend(plain_context(), &b));
    tensor_expect_equal("out", &far.out, &small.out);
    tensor_expect_equal("lse", &far.lse, &small.lse);
    release(&memory);
    world_end(&small);
    world_end(&far);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_far_tensors),  cmocka_unit_test(test_far_scores),
        cmocka_unit_test(test_high_blocks),  cmocka_unit_test(test_high_slots),
        cmocka_unit_test(test_high_columns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

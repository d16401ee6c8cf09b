/*
 * Checking mode's host copies of ids (src/fetch.h), without a GPU: a module of the test's own stands in, whose
 * device memory lies FAR behind what it really is, so that nobody can read it by mistake.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include "cuda/module.h"
#include "fetch.h"

static const uintptr_t FAR = (uintptr_t)1 << 46; /* past the host's addresses, below half of all */

static int fetches;
static size_t fetched_bytes;
static csa_status fetch_status;

static csa_status fetch(const csa_context *context, void *to, const void *from, size_t bytes, void *stream)
{
    (void)context;
    fetches++;
    fetched_bytes += bytes;
    if (fetch_status != CSA_OK || stream != &fetches)
        return csa_fail(CSA_ERROR_DEVICE, "the test's device fails");
    memcpy(to, (const void *)((uintptr_t)from - FAR), bytes);
    return CSA_OK;
}

static const csa_cuda_module module = {.fetch = fetch};
static const csa_context device = {.backend = CSA_BACKEND_CUDA, .check = true, .cuda = &module};
static int64_t numbers[1 << 20];

static csa_tensor on_device(csa_tensor t)
{
    t.data = (void *)((uintptr_t)t.data + FAR);
    return t;
}

static csa_fetched start(csa_checker *c)
{
    csa_fetched f;
    fetches = 0;
    fetched_bytes = 0;
    fetch_status = CSA_OK;
    *c = (csa_checker){.call = "a call"};
    CHECK(csa_checking(&f, c, &device, &fetches));
    return f;
}

/* All elements of a view, read through the copy; then the view is as before. */
static void expect_fetched(csa_tensor t, int most_fetches)
{
    csa_checker c;
    csa_fetched f = start(&c);
    csa_tensor there = on_device(t), before = there;
    csa_fetch(&f, &there);
    CHECKF(c.status == CSA_OK, "%s", test_error());
    for (int64_t i = 0; i < t.shape[0]; i++)
        for (int64_t j = 0; j < (t.ndim > 1 ? t.shape[1] : 1); j++)
            CHECK(memcmp(tensor_at(&there, i, j, 0, 0), tensor_at(&t, i, j, 0, 0),
                         (size_t)tensor_itemsize(t.dtype)) == 0);
    CHECKF(fetches <= most_fetches, "%d", fetches);
    CHECK(fetched_bytes <= (size_t)(4 * tensor_count(&t) * tensor_itemsize(t.dtype)) + (1 << 20));
    csa_end_fetch(&f);
    CHECK(memcmp(&there, &before, sizeof there) == 0);
}

static csa_tensor vector(int64_t first, int64_t count, int64_t stride)
{
    csa_tensor t = csa_tensor_1d(numbers + first, CSA_I64, count);
    t.stride[0] = stride;
    return t;
}

static csa_tensor matrix(int64_t first, int64_t count, int64_t columns, int64_t stride)
{
    csa_tensor t = csa_tensor_2d(numbers + first, CSA_I64, count, columns);
    t.stride[0] = stride;
    return t;
}

static void any_stride_is_fetched(void **state)
{
    (void)state;
    for (int64_t i = 0; i < 1 << 20; i++)
        numbers[i] = i;
    expect_fetched(vector(5, 9, 1), 1);
    expect_fetched(vector(5, 9, 0), 1);
    expect_fetched(vector(60, 9, -7), 1);
    expect_fetched(vector(3, 4, 200000), 4); /* far apart: each alone */
    expect_fetched(vector((1 << 20) - 1, 4, -200000), 4);
    expect_fetched(matrix(1, 5, 3, 3), 1);
    expect_fetched(matrix(1, 5, 3, 1), 1); /* rows that overlap */
    expect_fetched(matrix(1, 5, 3, 0), 1);
    expect_fetched(matrix(99, 5, 3, -8), 1);
    expect_fetched(matrix((1 << 20) - 3, 4, 3, -200000), 4);
    csa_tensor narrow = csa_tensor_1d((const uint8_t *)numbers + 3, CSA_BOOL, 40);
    expect_fetched(narrow, 1);
}

static void nothing_needs_no_memory(void **state)
{
    (void)state;
    csa_checker c;
    csa_fetched f = start(&c);
    csa_tensor none[] = {{0}, csa_tensor_1d(NULL, CSA_I64, 0), csa_tensor_2d(NULL, CSA_I32, 3, 0)};
    for (int i = 0; i < 3; i++)
        csa_fetch(&f, &none[i]);
    CHECK(c.status == CSA_OK && fetches == 0 && f.count == 0);
}

static void no_memory_is_a_refusal(void **state)
{
    (void)state;
    csa_checker c;
    csa_fetched f = start(&c);
    csa_tensor first = on_device(vector(0, 4, 1)),
               huge = on_device(matrix(0, (int64_t)1 << 38, 1 << 16, 1 << 16));
    if (TEST_SANITIZED) {
        print_message("skipped: sanitizers have an allocator of their own\n");
        skip();
    }
    csa_fetch(&f, &first);
    csa_fetch(&f, &huge);
    CHECK(c.status == CSA_ERROR_MEMORY && strstr(test_error(), "a call: checking mode: no memory"));
    csa_end_fetch(&f);
    CHECK((uintptr_t)first.data == (uintptr_t)numbers + FAR && f.count == 0);
}

static void a_devices_failure_ends_it(void **state)
{
    (void)state;
    csa_checker c;
    csa_fetched f = start(&c);
    csa_tensor t = on_device(vector(0, 4, 1)), other = t;
    fetch_status = CSA_ERROR_DEVICE;
    csa_fetch(&f, &t);
    csa_fetch(&f, &other);
    CHECK(c.status == CSA_ERROR_DEVICE && fetches == 1);
    csa_end_fetch(&f);
    CHECK((uintptr_t)t.data == (uintptr_t)numbers + FAR);
}

/* A whole call: its id is on the device, its refusal names it. */
static void calls_fetch_their_ids(void **state)
{
    (void)state;
    int64_t current[] = {1, 7};
    fetch_status = CSA_OK;
    csa_select_args a = {.size = sizeof a, .topk = 4, .stream = &fetches};
    a.scores = csa_tensor_2d(NULL, CSA_F32, 2, 3);
    a.current = on_device(csa_tensor_1d(current, CSA_I64, 2));
    a.selected = on_device(csa_tensor_2d(numbers, CSA_I64, 2, 4));
    CHECK(csa_select(&device, &a) == CSA_ERROR_ID);
    CHECK(strstr(test_error(), "csa_select: current[1] is 7, expected -1 to 2"));
}

static void hosts_copy_nothing(void **state)
{
    (void)state;
    csa_context host = {.backend = CSA_BACKEND_REF, .check = true};
    csa_checker c = {.call = "a call"};
    csa_fetched f;
    csa_tensor t = vector(0, 4, 1);
    CHECK(csa_checking(&f, &c, &host, NULL));
    csa_fetch(&f, &t);
    CHECK(t.data == numbers && f.count == 0);
    host.check = false;
    CHECK(!csa_checking(&f, &c, &host, NULL));
}

int main(void)
{
    test_needs_host("it brings a device of its own");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_stride_is_fetched),  cmocka_unit_test(nothing_needs_no_memory),
        cmocka_unit_test(no_memory_is_a_refusal), cmocka_unit_test(a_devices_failure_ends_it),
        cmocka_unit_test(calls_fetch_their_ids),  cmocka_unit_test(hosts_copy_nothing),
    };
    test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/*
 * Which sizes of the model are taken, and that each refusal says which would be; then the small things: error
 * text, versions, back ends, contexts, workspace sizes, warming up. SPDX-License-Identifier: Apache-2.0
 */
#include "support.h"

#include <pthread.h>

static csa_context *context;

static int make_context(void **state)
{
    (void)state;
    context = test_context((csa_context_options){.threads = 2});
    return 0;
}

static int end_context(void **state)
{
    (void)state;
    csa_context_destroy(context);
    return 0;
}

static void expect_size(bool good, csa_status status, const char *value, const char *allowed)
{
    if (good) {
        CHECKF(status == CSA_OK, "%s", test_error());
        return;
    }
    CHECKF(status == CSA_ERROR_UNSUPPORTED, "%s for %s: %s", csa_status_name(status), value, test_error());
    CHECKF(strstr(test_error(), value) && strstr(test_error(), allowed), "\"%s\" lacks \"%s\" or \"%s\"",
           test_error(), value, allowed);
}

static const char *text_of(const char *format, int64_t value)
{
    static char text[100];
    snprintf(text, sizeof text, format, (long long)value);
    return text;
}

/* ---- Sizes -------------------------------------------------------------------------------------- */

/* A made-up tensor without gaps. */
static csa_tensor made_up(csa_dtype dtype, int ndim, int64_t n0, int64_t n1, int64_t n2, int64_t n3)
{
    csa_tensor t = csa_tensor_4d((void *)(uintptr_t)4096, dtype, n0, n1, n2, n3);
    if (ndim == 3)
        t = csa_tensor_3d(t.data, dtype, n0, n1, n2);
    if (ndim == 2)
        t = csa_tensor_2d(t.data, dtype, n0, n1);
    return ndim == 1 ? csa_tensor_1d(t.data, dtype, n0) : t;
}

typedef struct sizes {
    int64_t groups, heads, index_heads, block_size, topk, regions, head_size;
    csa_dtype kv_dtype;
} sizes;

/* csa_decode of five tokens of five requests. */
static csa_status decode_of(sizes s)
{
    csa_tokens tokens = {.size = sizeof tokens};
    csa_cache cache = {.size = sizeof cache};
    tokens.block_table = made_up(CSA_I32, 2, 5, 10, 0, 0);
    tokens.positions = made_up(CSA_I64, 1, 5, 0, 0, 0);
    cache.kv = made_up(s.kv_dtype, 4, 30, s.groups, s.block_size, CSA_KV_SIZE);
    cache.summaries = made_up(CSA_E4M3, 3, 30, s.block_size / 8, CSA_SUMMARY_SIZE, 0);
    csa_step_args a = {.size = sizeof a, .tokens = &tokens, .cache = &cache, .topk = (int32_t)s.topk};
    a.index_query = made_up(CSA_E4M3, 4, 5, s.groups, s.index_heads, CSA_SUMMARY_SIZE);
    a.index_weights = made_up(CSA_F32, 3, 5, s.groups, s.index_heads, 0);
    a.query = a.out = made_up(CSA_BF16, 4, 5, s.groups, s.heads, s.head_size);
    a.regions = s.regions;
    a.workspace.data = (void *)(uintptr_t)4096;
    a.workspace.bytes = (size_t)1 << 40;
    return csa_supported(context, CSA_OP_DECODE, &a);
}

static const sizes usual = {4, 16, 8, 64, 512, 1000, 192, CSA_BF16};

static void sizes_of_steps(void **state)
{
    (void)state;
    for (int64_t n = 0; n <= 20; n++) {
        sizes s = usual;
        s.groups = n;
        expect_size(n >= 1 && n <= 8, decode_of(s), text_of("is %lld", n), "1 to 8");
        s = usual;
        s.heads = n;
        expect_size(n >= 1 && n <= 16, decode_of(s), text_of("is %lld", n), "1 to 16");
        s = usual;
        s.index_heads = n;
        expect_size((n >= 1 && n <= 8) || n == 16, decode_of(s), text_of("is %lld", n), "1 to 8, 16");
    }
    for (int64_t n = 0; n <= 1100; n++) {
        sizes s = usual;
        s.topk = n; /* 0 is the default */
        expect_size(n <= 1024, decode_of(s), text_of("topk is %lld", n), "1 to 1024");
        s = usual;
        s.block_size = n;
        bool power = n == 16 || n == 32 || n == 64 || n == 128;
        expect_size(power, decode_of(s), text_of("block size is %lld", n), "16, 32, 64, 128");
        s = usual;
        s.head_size = n;
        expect_size(n == 192, decode_of(s), text_of("is %lld", n), "192");
    }
    sizes s = usual;
    s.kv_dtype = CSA_U8; /* e4m3 */
    CHECK_OK(decode_of(s));
    s.kv_dtype = CSA_E4M3;
    CHECK_OK(decode_of(s));
    s.kv_dtype = CSA_F32;
    CHECK(decode_of(s) == CSA_ERROR_ARGUMENT);
    s = usual;
    s.topk = -1;
    expect_size(false, decode_of(s), "topk is -1", "1 to 1024");
    s = usual;
    s.regions = 0; /* what the table holds */
    CHECK_OK(decode_of(s));
}

static csa_status prepare_of(int64_t groups, int64_t heads, int64_t index_heads, int64_t rotary)
{
    csa_tokens tokens = {.size = sizeof tokens, .positions = made_up(CSA_I64, 1, 5, 0, 0, 0)};
    csa_prepare_args a = {.size = sizeof a, .tokens = &tokens};
    a.index_query = made_up(CSA_BF16, 4, 5, groups, index_heads, CSA_SUMMARY_SIZE);
    a.index_weights = made_up(CSA_BF16, 3, 5, groups, index_heads, 0);
    a.index_key = a.index_key_out = made_up(CSA_BF16, 2, 5, CSA_SUMMARY_SIZE, 0, 0);
    a.index_query_norm = a.index_key_norm = a.index_key_bias = made_up(CSA_BF16, 1, CSA_SUMMARY_SIZE, 0, 0, 0);
    a.index_rope = made_up(CSA_F32, 2, 100, CSA_INDEX_ROTARY, 0, 0);
    a.index_query_out = made_up(CSA_E4M3, 4, 5, groups, CSA_INDEX_HEADS, CSA_SUMMARY_SIZE);
    a.index_weights_out = made_up(CSA_F32, 3, 5, groups, CSA_INDEX_HEADS, 0);
    a.query = a.query_out = made_up(CSA_BF16, 4, 5, groups, heads, CSA_HEAD_SIZE);
    a.key = a.key_out = a.value = made_up(CSA_BF16, 3, 5, groups, CSA_HEAD_SIZE, 0);
    a.query_norm = a.key_norm = made_up(CSA_BF16, 1, CSA_HEAD_SIZE, 0, 0, 0);
    a.rope = made_up(CSA_F32, 2, 100, rotary, 0, 0);
    return csa_supported(context, CSA_OP_PREPARE, &a);
}

static void sizes_of_prepare(void **state)
{
    (void)state;
    for (int64_t n = 0; n <= 20; n++) {
        expect_size(n >= 1 && n <= 8, prepare_of(n, 4, 4, 64), text_of("is %lld", n), "1 to 8");
        expect_size(n >= 1 && n <= 16, prepare_of(4, n, 4, 64), text_of("is %lld", n), "1 to 16");
        expect_size(n == 2 || n == 4, prepare_of(4, 4, n, 64), text_of("is %lld", n), "2, 4");
    }
    for (int64_t n = 0; n <= 200; n++)
        expect_size(n <= 192 && n % 2 == 0, prepare_of(4, 4, 4, n), text_of("rotary is %lld", n),
                    "even, 0 to 192");
}

static void sizes_of_selections(void **state)
{
    (void)state;
    for (int64_t k = -2; k <= 1030; k++)
        for (int64_t regions = k - 1; regions <= k + 1; regions++) {
            int64_t width = k < regions ? k : regions;
            if (k == 0) /* the default, 512 */
                width = regions < 512 ? regions : 512;
            csa_select_args a = {.size = sizeof a, .topk = (int32_t)k};
            a.scores = made_up(CSA_F32, 2, 3, regions < 0 ? 0 : regions, 0, 0);
            a.current = made_up(CSA_I64, 1, 3, 0, 0, 0);
            a.selected = made_up(CSA_I64, 2, 3, (width < 0 ? 0 : width) + 1, 0, 0);
            expect_size(k >= 0 && k <= 1024, csa_supported(context, CSA_OP_SELECT, &a),
                        text_of("topk is %lld", k), "1 to 1024");
        }
}

/* ---- Workspace sizes and warming up ------------------------------------------------------------- */

static void servings_are_checked(void **state)
{
    (void)state;
    static const struct {
        csa_serving serving;
        const char *text; /* NULL: accepted */
    } servings[] = {
        {{.regions = 1000, .decode_tokens = 8, .prefill_tokens = 4096, .groups = 4}, NULL},
        {{.regions = 0}, NULL},
        {{.index_heads = 16, .kv_dtype = CSA_E4M3, .block_size = 128, .heads = 1, .topk = 1024}, NULL},
        {{.regions = -1}, "regions is -1"},
        {{.decode_tokens = -1}, "decode_tokens is -1"},
        {{.prefill_tokens = -7}, "prefill_tokens is -7"},
        {{.groups = 9}, "groups is 9, supported: 1 to 8"},
        {{.heads = 17}, "heads is 17, supported: 1 to 16"},
        {{.index_heads = 9}, "index_heads is 9, supported: 1 to 8, 16"},
        {{.index_heads = 17}, "index_heads is 17, supported: 1 to 8, 16"},
        {{.block_size = 24}, "block_size is 24, supported: 16, 32, 64, 128"},
        {{.topk = 1025}, "topk is 1025, supported: 1 to 1024"},
        {{.kv_dtype = CSA_F32}, "supported: bf16, e4m3"},
    };
    for (size_t i = 0; i < sizeof servings / sizeof *servings; i++) {
        csa_serving s = servings[i].serving;
        size_t bytes = 12345;
        s.size = sizeof s;
        csa_status status = csa_workspace_size(NULL, &s, &bytes);
        CHECKF((status == CSA_OK) == !servings[i].text, "%s: %s", servings[i].text, test_error());
        if (status == CSA_OK)
            continue;
        CHECK(status == CSA_ERROR_UNSUPPORTED && bytes == 12345);
        CHECKF(strstr(test_error(), servings[i].text), "\"%s\", expected \"%s\"", test_error(),
               servings[i].text);
        CHECK(csa_warm_up(context, &s, (csa_workspace){NULL, 0}) == CSA_ERROR_UNSUPPORTED);
        CHECKF(strstr(test_error(), servings[i].text), "\"%s\", expected \"%s\"", test_error(),
               servings[i].text);
    }
    csa_serving s = {.size = sizeof s, .regions = 1000, .decode_tokens = 8};
    csa_context_options cuda = {.size = sizeof cuda, .backend = (csa_backend)77};
    size_t bytes;
    CHECK(csa_workspace_size(NULL, &s, NULL) == CSA_ERROR_ARGUMENT);
    CHECK(csa_workspace_size(NULL, NULL, &bytes) == CSA_ERROR_ARGUMENT);
    CHECK(csa_workspace_size(&cuda, &s, &bytes) == CSA_ERROR_ARGUMENT);
    CHECK(csa_warm_up(NULL, &s, (csa_workspace){NULL, 0}) == CSA_ERROR_ARGUMENT);
}

static void warming_up_needs_the_workspace(void **state)
{
    (void)state;
    csa_serving s = {.size = sizeof s, .regions = 1000, .decode_tokens = 8, .topk = 3};
    csa_context_options options = test_options((csa_context_options){0});
    size_t bytes;
    arena memory = {NULL};
    CHECK_OK(csa_workspace_size(&options, &s, &bytes));
    csa_tensor workspace = arena_tensor(&memory, "workspace", NULL, CSA_U8, 1, (int)bytes);
    CHECK(csa_warm_up(context, &s, (csa_workspace){workspace.data, bytes - 1}) == CSA_ERROR_WORKSPACE);
    CHECKF(strstr(test_error(), text_of("needs %lld", (int64_t)bytes)), "%s", test_error());
    CHECK(csa_warm_up(context, &s, (csa_workspace){NULL, bytes}) == CSA_ERROR_ARGUMENT);
    CHECK(csa_warm_up(context, &s, (csa_workspace){(char *)workspace.data + 128, bytes}) == CSA_ERROR_ARGUMENT);
    CHECK_OK(csa_warm_up(context, &s, (csa_workspace){workspace.data, bytes}));
    s.decode_tokens = 0; /* nothing to run, nothing needed */
    CHECK_OK(csa_workspace_size(&options, &s, &bytes));
    CHECK(bytes == 0);
    CHECK_OK(csa_warm_up(context, &s, (csa_workspace){NULL, 0}));
    arena_check(&memory);
    arena_free(&memory);
}

/* ---- Error text --------------------------------------------------------------------------------- */

static void *fresh_thread(void *argument)
{
    bool *good = argument;
    char text[8] = "unread";
    *good = csa_last_error(NULL, 0) == 0 && csa_last_error(text, sizeof text) == 0 && text[0] == 0;
    return NULL;
}

static void error_text_is_cut_and_kept(void **state)
{
    (void)state;
    char whole[600], cut[8];
    CHECK(csa_score(context, NULL) == CSA_ERROR_ARGUMENT);
    size_t length = csa_last_error(whole, sizeof whole);
    CHECK(length == strlen(whole) && length > sizeof cut);
    CHECK(csa_last_error(NULL, 0) == length);
    memset(cut, 'x', sizeof cut);
    CHECK(csa_last_error(cut, sizeof cut - 1) == length);
    CHECK(strncmp(cut, whole, 6) == 0 && cut[6] == 0 && cut[7] == 'x');
    CHECK(csa_last_error(cut, 1) == length && cut[0] == 0);
    cut[0] = 'x';
    CHECK(csa_last_error(cut, 0) == length && cut[0] == 'x');
    CHECK_OK(csa_workspace_size(NULL, &(csa_serving){.size = sizeof(csa_serving)}, &(size_t){0}));
    CHECK(csa_last_error(cut, sizeof cut) == length && strncmp(cut, whole, 7) == 0);
    pthread_t thread;
    bool good = false;
    CHECK(pthread_create(&thread, NULL, fresh_thread, &good) == 0);
    pthread_join(thread, NULL);
    CHECK(good);
    CHECK(strcmp(test_error(), whole) == 0);
}

/* ---- Versions, back ends, contexts -------------------------------------------------------------- */

static void names_are_never_null(void **state)
{
    (void)state;
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", CSA_VERSION_MAJOR, CSA_VERSION_MINOR, CSA_VERSION_PATCH);
    CHECK(csa_version() == CSA_VERSION && strcmp(csa_version_string(), version) == 0);
    CHECK(strcmp(csa_status_name(CSA_ERROR_ARGUMENT), "argument") == 0);
    for (int status = -2; status < 12; status++)
        CHECK(csa_status_name((csa_status)status) && *csa_status_name((csa_status)status));
    const char *names[] = {"default", "ref", "cpu", "cuda"};
    for (int b = 0; b < 4; b++)
        CHECK(strcmp(csa_backend_name((csa_backend)b), names[b]) == 0);
    CHECK(csa_backend_name((csa_backend)99) && csa_backend_name((csa_backend)-1));
}

static void back_ends_are_described(void **state)
{
    (void)state;
    for (int b = 0; b < 4; b++) {
        char text[256] = "", cut[5] = "xxxx";
        csa_context *made = NULL;
        csa_context_options options = {.size = sizeof options, .backend = (csa_backend)b};
        csa_status status = csa_backend_describe((csa_backend)b, text, sizeof text);
        CHECK(status == CSA_OK || status == CSA_ERROR_UNSUPPORTED);
        CHECK(*text && !strchr(text, '\n'));
        CHECK(csa_backend_describe((csa_backend)b, cut, sizeof cut) == status);
        CHECK(strncmp(cut, text, 4) == 0 && cut[4] == 0);
        CHECK(csa_backend_describe((csa_backend)b, NULL, 0) == status);
        CHECK(csa_context_create(&options, &made) == status && (status == CSA_OK) == (made != NULL));
        if (made) {
            csa_backend runs = csa_context_backend(made);
            CHECK(runs != CSA_BACKEND_DEFAULT && (b == 0 || (int)runs == b));
            CHECK(csa_context_threads(made) >= 1);
        }
        csa_context_destroy(made);
    }
    CHECK(csa_backend_describe(CSA_BACKEND_REF, NULL, 0) == CSA_OK);
    char text[256] = "";
    CHECK(csa_backend_describe((csa_backend)9, text, sizeof text) == CSA_ERROR_ARGUMENT);
    CHECKF(strcmp(text, "there is no back end 9") == 0, "%s", text);
    CHECKF(strstr(test_error(), "no back end 9"), "%s", test_error());
    CHECK(csa_device_describe(CSA_BACKEND_CPU, 0, NULL, 0) == CSA_ERROR_ARGUMENT);
    CHECK(strstr(test_error(), "csa_device_describe: cpu has no device 0: it runs on the host"));
    csa_backend_describe(CSA_BACKEND_CUDA, text, 200);
    CHECK(csa_device_describe(CSA_BACKEND_CUDA, -1, NULL, 0) == CSA_ERROR_ARGUMENT);
    CHECKF(strstr(test_error(), "cuda has no device -1: ") && strstr(test_error(), text), "%s", test_error());
}

typedef struct logged {
    int lines;
    char text[200];
} logged;

static void keep_line(void *user, const char *line)
{
    logged *l = user;
    l->lines++;
    snprintf(l->text, sizeof l->text, "%s", line);
}

static void contexts_check_their_options(void **state)
{
    (void)state;
    csa_context *made = (csa_context *)(uintptr_t)1;
    logged log = {0};
    csa_context_options o = {.size = sizeof o, .threads = -1};
    CHECK(csa_context_create(&o, &made) == CSA_ERROR_ARGUMENT && !made);
    CHECKF(strstr(test_error(), "threads is -1, expected 0 to"), "%s", test_error());
    o.threads = 1 << 20;
    CHECK(csa_context_create(&o, &made) == CSA_ERROR_ARGUMENT && !made);
    o.threads = 0;
    o.parallel_for = pool_for;
    CHECK(csa_context_create(&o, &made) == CSA_ERROR_ARGUMENT && !made);
    CHECKF(strstr(test_error(), "threads is 0, but parallel_for"), "%s", test_error());
    o = (csa_context_options){.size = sizeof o, .backend = (csa_backend)42};
    CHECK(csa_context_create(&o, &made) == CSA_ERROR_ARGUMENT && !made);
    CHECKF(strstr(test_error(), "no back end 42"), "%s", test_error());
    o.size = 0;
    CHECK(csa_context_create(&o, &made) == CSA_ERROR_ARGUMENT && !made);
    CHECK(csa_context_create(NULL, NULL) == CSA_ERROR_ARGUMENT);
    csa_context_destroy(NULL);
    CHECK(csa_context_backend(NULL) == CSA_BACKEND_DEFAULT && csa_context_threads(NULL) == 0);
    CHECK(strcmp(csa_context_tier(NULL), "none") == 0);
    CHECK_OK(csa_context_create(NULL, &made)); /* all defaults */
    csa_context_destroy(made);
    o = (csa_context_options){.size = sizeof o, .threads = 3, .log = keep_line, .log_user = &log};
    CHECK_OK(csa_context_create(&o, &made));
    CHECK(csa_context_threads(made) == 3);
    CHECKF(log.lines == 1 && strstr(log.text, "3 threads") && !strchr(log.text, '\n'), "%s", log.text);
    csa_context_destroy(made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_of_steps),
        cmocka_unit_test(sizes_of_prepare),
        cmocka_unit_test(sizes_of_selections),
        cmocka_unit_test(servings_are_checked),
        cmocka_unit_test(warming_up_needs_the_workspace),
        cmocka_unit_test(error_text_is_cut_and_kept),
        cmocka_unit_test(names_are_never_null),
        cmocka_unit_test(back_ends_are_described),
        cmocka_unit_test(contexts_check_their_options),
    };
    test_seed();
    return cmocka_run_group_tests(tests, make_context, end_context);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "support.h"

#include <inttypes.h>
#include <pthread.h>

#if TEST_ASAN
#include <sanitizer/asan_interface.h>

/* LLVM's OpenMP runtime loses a team when the next one has another size. */
__attribute__((visibility("default"))) const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libomp.so\n";
}
#else
#define __asan_poison_memory_region(address, bytes)   ((void)(address), (void)(bytes))
#define __asan_unpoison_memory_region(address, bytes) ((void)(address), (void)(bytes))
#endif

/* ---- Checks ------------------------------------------------------------------------------------- */

static uint64_t seed;
static int64_t draw = -1;

uint64_t test_seed(void)
{
    static bool known;
    if (!known) {
        const char *text = getenv("CSA_TEST_SEED");
        seed = text && *text ? strtoull(text, NULL, 0) : 20240607;
        known = true;
        print_message("CSA_TEST_SEED=%" PRIu64 "\n", seed);
    }
    return seed;
}

void test_set_draw(int64_t number)
{
    draw = number;
}

void test_fail(const char *file, int line, const char *what, const char *format, ...)
{
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_error("%s:%d: %s\n    %s\n    CSA_TEST_SEED=%" PRIu64 ", draw %lld\n", file, line, what, text,
                test_seed(), (long long)draw);
    _fail(file, line);
}

const char *test_error(void)
{
    static _Thread_local char text[600];
    text[0] = 0;
    csa_last_error(text, sizeof text);
    return text;
}

void test_expect_ok(const char *file, int line, const char *what, csa_status status)
{
    if (status != CSA_OK)
        test_fail(file, line, what, "%s error: %s", csa_status_name(status), test_error());
}

/* ---- Random numbers ----------------------------------------------------------------------------- */

uint64_t random_bits(test_random *r) /* splitmix64 */
{
    uint64_t z = r->state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

test_random random_of(uint64_t a, uint64_t b)
{
    test_random r = {test_seed()};
    r.state = random_bits(&r) ^ a;
    r.state = random_bits(&r) ^ b;
    return r;
}

int64_t random_between(test_random *r, int64_t low, int64_t high)
{
    return low + (int64_t)(random_bits(r) % (uint64_t)(high - low + 1));
}

bool random_chance(test_random *r, int percent)
{
    return random_between(r, 0, 99) < percent;
}

double random_unit(test_random *r)
{
    return (double)(random_bits(r) >> 11) * 0x1p-53;
}

double random_normal(test_random *r) /* twelve uniform numbers of 16 bits */
{
    int64_t sum = 0;
    for (int word = 0; word < 3; word++)
        for (uint64_t bits = random_bits(r), i = 0; i < 4; i++, bits >>= 16)
            sum += (int64_t)(bits & 0xFFFF);
    return ((double)sum - 6 * 65535.0) / 65536;
}

void random_shuffle(test_random *r, int32_t *values, int64_t count)
{
    for (int64_t i = count - 1; i > 0; i--) {
        int64_t j = random_between(r, 0, i);
        int32_t moved = values[i];
        values[i] = values[j];
        values[j] = moved;
    }
}

/* ---- Number formats ----------------------------------------------------------------------------- */

float bf16_value(uint16_t code)
{
    uint32_t bits = (uint32_t)code << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The nearer one of the two neighbours; what lies past the largest counts as 2^128. */
uint16_t bf16_code(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1);
    if (isnan(x))
        return low | 0x40;
    if (isinf(x))
        return low;
    double above = (high & 0x7FFF) == 0x7F80 ? 0x1p128 : fabs((double)bf16_value(high));
    double to_low = fabs((double)x) - fabs((double)bf16_value(low)), to_high = above - fabs((double)x);
    return to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
}

float bf16_rounded(float x)
{
    return bf16_value(bf16_code(x));
}

float e4m3_value(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float step = (float)(1 << (exponent ? exponent - 1 : 0)) * 0x1p-9F; /* between neighbours */
    float magnitude = step * (float)(exponent ? 8 + mantissa : mantissa);
    if (exponent == 15 && mantissa == 7)
        magnitude = NAN;
    return code & 0x80 ? -magnitude : magnitude;
}

uint8_t e4m3_code(float x)
{
    double magnitude = fabs((double)x);
    uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x))
        return 0x7F;
    if (magnitude >= 448)
        return sign | 0x7E;
    uint8_t low = 0, high = 0x7E; /* value(low) <= magnitude < value(high) */
    while (high - low > 1) {
        uint8_t middle = (uint8_t)((low + high) / 2);
        if ((double)e4m3_value(middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double to_low = magnitude - (double)e4m3_value(low), to_high = (double)e4m3_value(high) - magnitude;
    return sign | (to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high);
}

/* ---- Guarded memory ----------------------------------------------------------------------------- */

enum { GUARD = 256, GUARD_BYTE = 0xA5 };

static void guard(const buffer *b, bool poison)
{
    if (poison) {
        __asan_poison_memory_region(b->data - GUARD, GUARD);
        __asan_poison_memory_region(b->data + b->bytes, GUARD);
    } else {
        __asan_unpoison_memory_region(b->data - GUARD, GUARD);
        __asan_unpoison_memory_region(b->data + b->bytes, GUARD);
    }
}

buffer *arena_buffer(arena *a, const char *name, size_t bytes)
{
    buffer *b = calloc(1, sizeof *b);
    b->name = name;
    b->bytes = bytes;
    b->block = aligned_alloc(256, (2 * GUARD + bytes + 255) / 256 * 256);
    b->covered = calloc(bytes ? bytes : 1, 1);
    b->data = b->block + GUARD;
    memset(b->block, GUARD_BYTE, 2 * GUARD + bytes);
    memset(b->data, 0xFF, bytes);
    guard(b, true);
    b->next = a->first;
    a->first = b;
    return b;
}

static void check_buffer(const buffer *b)
{
    guard(b, false);
    for (size_t i = 0; i < GUARD; i++) {
        CHECKF(b->data[-1 - (ptrdiff_t)i] == GUARD_BYTE, "%s: written %zu bytes before its start", b->name,
               i + 1);
        CHECKF(b->data[b->bytes + i] == GUARD_BYTE, "%s: written %zu bytes past its end", b->name, i);
    }
    guard(b, true);
    for (size_t i = 0; i < b->bytes; i++)
        CHECKF(b->covered[i] || b->data[i] == 0xFF, "%s: byte %zu, which lies in a gap, was written", b->name,
               i);
}

void arena_check(const arena *a)
{
    for (const buffer *b = a->first; b; b = b->next)
        check_buffer(b);
}

void arena_free(arena *a)
{
    while (a->first) {
        buffer *b = a->first;
        a->first = b->next;
        guard(b, false);
        free(b->block);
        free(b->covered);
        free(b);
    }
}

void arena_expect_equal(const arena *got, const arena *expected, const char *except)
{
    const buffer *b = expected->first;
    for (const buffer *a = got->first; a; a = a->next, b = b->next) {
        CHECK(b && a->bytes == b->bytes && strcmp(a->name, b->name) == 0);
        if (strcmp(a->name, "workspace") == 0 || (except && strcmp(a->name, except) == 0))
            continue;
        for (size_t i = 0; i < a->bytes && memcmp(a->data, b->data, a->bytes) != 0; i++)
            CHECKF(a->data[i] == b->data[i], "%s: byte %zu of %zu is 0x%02X, expected 0x%02X", a->name, i,
                   a->bytes, a->data[i], b->data[i]);
    }
}

uint8_t *arena_snapshot(const arena *a)
{
    size_t bytes = 1;
    for (const buffer *b = a->first; b; b = b->next)
        bytes += b->bytes;
    uint8_t *snapshot = malloc(bytes), *next = snapshot;
    for (const buffer *b = a->first; b; next += b->bytes, b = b->next)
        memcpy(next, b->data, b->bytes);
    return snapshot;
}

bool arena_unchanged(const arena *a, const uint8_t *snapshot)
{
    for (const buffer *b = a->first; b; snapshot += b->bytes, b = b->next)
        if (memcmp(snapshot, b->data, b->bytes) != 0)
            return false;
    return true;
}

/* ---- Tensors ------------------------------------------------------------------------------------ */

int64_t tensor_itemsize(csa_dtype dtype)
{
    return (int64_t)(dtype >> 8 & 0xFF) / 8;
}

int64_t tensor_count(const csa_tensor *t)
{
    int64_t count = t->ndim ? 1 : 0;
    for (int d = 0; d < t->ndim; d++)
        count *= t->shape[d];
    return count;
}

/* The position of the n-th element in row-major order. */
static uint8_t *nth(const csa_tensor *t, int64_t n)
{
    int64_t element = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        element += n % t->shape[d] * t->stride[d];
        n /= t->shape[d];
    }
    return (uint8_t *)t->data + element * tensor_itemsize(t->dtype);
}

/* Elements that can be handled as one piece of memory. */
static int64_t run_of(const csa_tensor *t)
{
    int last = t->ndim - 1;
    return t->stride[last] == 1 ? t->shape[last] : 1;
}

void buffer_cover(buffer *b, const csa_tensor *view)
{
    int64_t count = tensor_count(view);
    for (int64_t n = 0; n < count; n += run_of(view))
        memset(b->covered + (nth(view, n) - b->data), 1, (size_t)(run_of(view) * tensor_itemsize(view->dtype)));
}

csa_tensor arena_tensor(arena *a, const char *name, test_random *gaps, csa_dtype dtype, int ndim, ...)
{
    csa_tensor t = {.dtype = dtype, .ndim = ndim};
    va_list extents;
    va_start(extents, ndim);
    for (int d = 0; d < ndim; d++)
        t.shape[d] = va_arg(extents, int); /* plain numbers in the call */
    va_end(extents);
    int64_t reach = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        bool may = gaps && (d < ndim - 1 || ndim == 1);
        t.stride[d] = reach + (may && random_chance(gaps, 70) ? random_between(gaps, 1, 9) : 0);
        reach = t.stride[d] * t.shape[d];
    }
    int64_t item = tensor_itemsize(dtype), before = gaps ? random_between(gaps, 0, 9) : 0;
    buffer *b = arena_buffer(a, name, (size_t)((before + reach) * item));
    t.data = b->data + before * item;
    buffer_cover(b, &t);
    return t;
}

void *tensor_at(const csa_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l)
{
    int64_t element = i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3];
    return (uint8_t *)t->data + element * tensor_itemsize(t->dtype);
}

static double number(csa_dtype dtype, const void *p)
{
    switch (dtype) {
    case CSA_I32:
        return *(const int32_t *)p;
    case CSA_I64:
        return (double)*(const int64_t *)p;
    case CSA_F32:
        return (double)*(const float *)p;
    case CSA_BF16:
        return (double)bf16_value(*(const uint16_t *)p);
    case CSA_E4M3:
        return (double)e4m3_value(*(const uint8_t *)p);
    default:
        return *(const uint8_t *)p;
    }
}

static void put(csa_dtype dtype, void *p, double value)
{
    switch (dtype) {
    case CSA_I32:
        *(int32_t *)p = (int32_t)value;
        break;
    case CSA_I64:
        *(int64_t *)p = (int64_t)value;
        break;
    case CSA_F32:
        *(float *)p = (float)value;
        break;
    case CSA_BF16:
        *(uint16_t *)p = bf16_code((float)value);
        break;
    case CSA_E4M3:
        *(uint8_t *)p = e4m3_code((float)value);
        break;
    default:
        *(uint8_t *)p = (uint8_t)value;
    }
}

double tensor_value(const csa_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l)
{
    return number(t->dtype, tensor_at(t, i, j, k, l));
}

void tensor_put(csa_tensor *t, double value, int64_t i, int64_t j, int64_t k, int64_t l)
{
    put(t->dtype, tensor_at(t, i, j, k, l), value);
}

csa_tensor tensor_slice(csa_tensor t, int64_t first, int64_t count)
{
    if (t.ndim) {
        t.data = t.data ? tensor_at(&t, first, 0, 0, 0) : NULL;
        t.shape[0] = count;
    }
    return t;
}

void tensor_copy(csa_tensor *to, const csa_tensor *from)
{
    int64_t count = tensor_count(from), run = run_of(from) == run_of(to) ? run_of(from) : 1;
    CHECK(count == tensor_count(to) && to->dtype == from->dtype);
    for (int64_t n = 0; n < count; n += run)
        memcpy(nth(to, n), nth(from, n), (size_t)(run * tensor_itemsize(to->dtype)));
}

void tensor_set(csa_tensor *t, int byte)
{
    int64_t count = tensor_count(t);
    for (int64_t n = 0; n < count; n += run_of(t))
        memset(nth(t, n), byte, (size_t)(run_of(t) * tensor_itemsize(t->dtype)));
}

/* Large tensors draw from a thousand values: encoding each would take most of the tests' time. */
void tensor_randomise(csa_tensor *t, test_random *r, double scale)
{
    enum { VALUES = 1024 };
    int64_t count = tensor_count(t), values = count < VALUES ? count : VALUES;
    size_t item = (size_t)tensor_itemsize(t->dtype);
    uint8_t *table = malloc(VALUES * item);
    for (int64_t i = 0; i < values; i++)
        put(t->dtype, table + (size_t)i * item, scale * random_normal(r));
    for (int64_t n = 0; n < count; n += run_of(t))
        for (int64_t i = 0; i < run_of(t); i++) {
            size_t value = values < VALUES ? (size_t)(n + i) : (size_t)(random_bits(r) % VALUES);
            memcpy(nth(t, n) + (size_t)i * item, table + value * item, item);
        }
    free(table);
}

static bool same_element(csa_dtype dtype, const void *a, const void *b)
{
    if (memcmp(a, b, (size_t)tensor_itemsize(dtype)) == 0)
        return true;
    bool floating = dtype == CSA_F32 || dtype == CSA_BF16 || dtype == CSA_E4M3;
    return floating && isnan(number(dtype, a)) && isnan(number(dtype, b));
}

/* The first element that differs, -1 if none does. */
static int64_t difference(const csa_tensor *a, const csa_tensor *b)
{
    int64_t count = tensor_count(a), run = run_of(a) == run_of(b) ? run_of(a) : 1;
    size_t item = (size_t)tensor_itemsize(a->dtype);
    for (int64_t n = 0; n < count; n += run) {
        const uint8_t *x = nth(a, n), *y = nth(b, n);
        if (memcmp(x, y, (size_t)run * item) == 0)
            continue;
        for (int64_t i = 0; i < run; i++)
            if (!same_element(a->dtype, x + (size_t)i * item, y + (size_t)i * item))
                return n + i;
    }
    return -1;
}

bool tensor_equal(const csa_tensor *a, const csa_tensor *b)
{
    return tensor_count(a) == tensor_count(b) && a->dtype == b->dtype && difference(a, b) < 0;
}

void tensor_expect_equal(const char *name, const csa_tensor *got, const csa_tensor *expected)
{
    CHECKF(tensor_count(got) == tensor_count(expected) && got->dtype == expected->dtype, "%s: shapes differ",
           name);
    int64_t n = difference(got, expected), left = n, index[CSA_MAX_DIMS] = {0};
    if (n < 0)
        return;
    for (int d = got->ndim - 1; d >= 0; left /= got->shape[d], d--)
        index[d] = left % got->shape[d];
    test_fail(__FILE__, __LINE__, name, "[%lld, %lld, %lld, %lld] is %.9g, expected %.9g", (long long)index[0],
              (long long)index[1], (long long)index[2], (long long)index[3], number(got->dtype, nth(got, n)),
              number(expected->dtype, nth(expected, n)));
}

/* ---- Threads and contexts ----------------------------------------------------------------------- */

enum { POOL_THREADS = 6 };

typedef struct job {
    struct job *next;
    csa_task task;
    void *data;
    int32_t count, taken, finished;
} job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    pthread_t threads[POOL_THREADS];
    job *jobs; /* that have tasks left to take */
    bool started, stop;
} pool = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

/* Takes one task of a job and runs it; called, and returns, with the lock held. */
static void run_one(job *j)
{
    int32_t task = j->taken++;
    if (j->taken == j->count) {
        job **link = &pool.jobs;
        while (*link != j)
            link = &(*link)->next;
        *link = j->next;
    }
    pthread_mutex_unlock(&pool.lock);
    j->task(j->data, task);
    pthread_mutex_lock(&pool.lock);
    if (++j->finished == j->count)
        pthread_cond_broadcast(&pool.done);
}

static void *pool_thread(void *nothing)
{
    pthread_mutex_lock(&pool.lock);
    while (!pool.stop)
        if (pool.jobs)
            run_one(pool.jobs);
        else
            pthread_cond_wait(&pool.work, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    return nothing;
}

static void stop_pool(void)
{
    pthread_mutex_lock(&pool.lock);
    pool.stop = true;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < POOL_THREADS; i++)
        pthread_join(pool.threads[i], NULL);
}

static void start_pool(void)
{
    pool.started = true;
    for (int i = 0; i < POOL_THREADS; i++)
        if (pthread_create(&pool.threads[i], NULL, pool_thread, NULL) != 0)
            abort();
    atexit(stop_pool);
}

void pool_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    job j = {.task = task, .data = task_data, .count = count};
    pthread_mutex_lock(&pool.lock);
    if (!pool.started)
        start_pool();
    j.next = pool.jobs;
    pool.jobs = &j;
    pthread_cond_broadcast(&pool.work);
    while (j.taken < j.count)
        run_one(&j);
    while (j.finished < j.count)
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

void serial_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    for (int32_t i = 0; i < count; i++)
        task(task_data, i);
}

void reverse_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    for (int32_t i = count - 1; i >= 0; i--)
        task(task_data, i);
}

typedef struct foreign {
    pthread_t thread;
    csa_task task;
    void *data;
    int32_t index;
} foreign;

static void *foreign_thread(void *argument)
{
    const foreign *f = argument;
    f->task(f->data, f->index);
    return NULL;
}

void foreign_for(void *unused, int32_t count, csa_task task, void *task_data)
{
    (void)unused;
    foreign *all = malloc((size_t)count * sizeof *all);
    for (int32_t i = 0; i < count; i++) {
        all[i] = (foreign){.task = task, .data = task_data, .index = i};
        if (pthread_create(&all[i].thread, NULL, foreign_thread, &all[i]) != 0)
            abort();
    }
    for (int32_t i = 0; i < count; i++)
        pthread_join(all[i].thread, NULL);
    free(all);
}

_Noreturn static void skip_program(const char *format, const char *name, const char *reason)
{
    print_message(format, name, reason);
    exit(77); /* what ctest takes for that */
}

bool test_on_cuda(void)
{
    const char *name = getenv("CSA_TEST_BACKEND");
    return name && strcmp(name, "cuda") == 0;
}

void test_needs_host(const char *reason)
{
    if (test_on_cuda())
        skip_program("skipped %s: %s\n", "on cuda", reason);
}

static void take_tier(csa_context_options *options, const char *tier)
{
    char text[256];
    options->backend = strcmp(tier, "ref") == 0 ? CSA_BACKEND_REF : CSA_BACKEND_CPU;
    options->tier = options->backend == CSA_BACKEND_CPU ? tier : NULL;
    csa_backend_describe(options->backend, text, sizeof text);
    if (options->tier && !strstr(text, tier))
        skip_program("skipped: no tier %s here: %s\n", tier, text);
}

static void take_backend(csa_context_options *options, const char *name)
{
    const char *preloaded = getenv("LD_PRELOAD");
    char text[256] = "there is none of this name";
    options->backend = CSA_BACKEND_CUDA;
    while (options->backend && strcmp(csa_backend_name(options->backend), name) != 0)
        options->backend--;
    if (!options->backend || csa_backend_describe(options->backend, text, sizeof text) != CSA_OK)
        skip_program("skipped: no back end %s here: %s\n", name, text);
    CHECKF(!test_on_cuda() || (preloaded && strstr(preloaded, "csa_mirror")),
           "%s cannot use a test's memory: put the mirror in front (docs/TESTING.md)", name);
    if (test_on_cuda())
        options->tier = getenv("CSA_TEST_TIER");
}

csa_context_options test_options(csa_context_options options)
{
    const char *tier = getenv("CSA_TEST_TIER"), *backend = getenv("CSA_TEST_BACKEND");
    options.size = sizeof options;
    if (backend && options.backend == CSA_BACKEND_DEFAULT)
        take_backend(&options, backend);
    else if (tier && options.backend == CSA_BACKEND_DEFAULT)
        take_tier(&options, tier);
    if (TEST_TSAN && !options.parallel_for) {
        options.parallel_for = pool_for;
        options.threads = options.threads ? options.threads : 4;
    }
    return options;
}

csa_context *test_context(csa_context_options options)
{
    csa_context *context = NULL;
    options = test_options(options);
    CHECK_OK(csa_context_create(&options, &context));
    return context;
}

/* ---- A world ------------------------------------------------------------------------------------ */

static void fill_in(world_shape *s)
{
    int32_t *fields[] = {&s->groups, &s->heads,    &s->index_heads, &s->block_size,
                         &s->topk,   &s->requests, &s->query_len,   &s->rotary};
    const int32_t defaults[] = {1, 1, 4, 16, 4, 1, 1, 64};
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        *fields[i] = *fields[i] ? *fields[i] : defaults[i];
    s->kv_dtype = s->kv_dtype ? s->kv_dtype : CSA_BF16;
    s->max_length = s->max_length ? s->max_length : 100;
    s->max_length = s->max_length > s->query_len ? s->max_length : s->query_len;
    if (!s->ring_capacity)
        s->ring_capacity = s->query_len > 2 ? 6 + s->query_len : 8;
}

/* Gaps for views, where the world has any. */
static test_random *gaps(world *w)
{
    return w->shape.strided ? &w->random : NULL;
}

static csa_tensor filled(world *w, const char *name, csa_dtype dtype, double scale, int n0, int n1, int n2,
                         int n3)
{
    int ndim = n3 >= 0 ? 4 : n2 >= 0 ? 3 : n1 >= 0 ? 2 : 1;
    csa_tensor t = arena_tensor(&w->memory, name, gaps(w), dtype, ndim, n0, n1, n2, n3);
    if (scale != 0)
        tensor_randomise(&t, &w->random, scale);
    return t;
}

static const float *scale_value(world *w, const char *name, float value)
{
    csa_tensor t = arena_tensor(&w->memory, name, NULL, CSA_F32, 1, 1);
    tensor_put(&t, (double)value, 0, 0, 0, 0);
    return t.data;
}

/* KV and summaries of a block side by side in one buffer, with gaps between rows, groups and blocks. */
static void make_shared_cache(world *w)
{
    const world_shape *s = &w->shape;
    int64_t item = tensor_itemsize(s->kv_dtype), per_block = s->block_size / CSA_REGION;
    int64_t token = CSA_KV_SIZE + 8 * random_between(&w->random, 0, 2);
    int64_t group = s->block_size * token + 8 * random_between(&w->random, 0, 2);
    int64_t summary = CSA_SUMMARY_SIZE + 8 * random_between(&w->random, 0, 2);
    int64_t kv_bytes = s->groups * group * item, block = kv_bytes + per_block * summary + 16;
    buffer *b = arena_buffer(&w->memory, "kv and summaries", (size_t)(w->blocks * block));
    w->cache.kv = csa_tensor_4d(b->data, s->kv_dtype, w->blocks, s->groups, s->block_size, CSA_KV_SIZE);
    w->cache.summaries = csa_tensor_3d(b->data + kv_bytes, CSA_E4M3, w->blocks, per_block, CSA_SUMMARY_SIZE);
    w->cache.kv.stride[0] = block / item;
    w->cache.kv.stride[1] = group;
    w->cache.kv.stride[2] = token;
    w->cache.summaries.stride[0] = block;
    w->cache.summaries.stride[1] = summary;
    buffer_cover(b, &w->cache.kv);
    buffer_cover(b, &w->cache.summaries);
}

static void make_cache(world *w)
{
    const world_shape *s = &w->shape;
    int blocks = (int)w->blocks, ring_rows = (int)(s->requests * s->ring_capacity) + 3;
    w->cache.size = sizeof w->cache;
    if (s->strided) {
        make_shared_cache(w);
    } else {
        w->cache.kv = filled(w, "kv", s->kv_dtype, 0, blocks, s->groups, s->block_size, CSA_KV_SIZE);
        w->cache.summaries =
            filled(w, "summaries", CSA_E4M3, 0, blocks, s->block_size / 8, CSA_SUMMARY_SIZE, -1);
    }
    tensor_randomise(&w->cache.kv, &w->random, 1);
    tensor_randomise(&w->cache.summaries, &w->random, 1);
    w->cache.ring = filled(w, "ring", CSA_BF16, 1, ring_rows, CSA_RING_SIZE, -1, -1);
    w->cache.ring_capacity = s->ring_capacity;
    w->cache.k_scale = scale_value(w, "k_scale", 0.75F);
    w->cache.v_scale = scale_value(w, "v_scale", 1.5F);
}

/* Lengths, then how many blocks and columns they need. */
static void make_lengths(world *w)
{
    const world_shape *s = &w->shape;
    int64_t longest = 0;
    w->lengths = malloc((size_t)s->requests * sizeof *w->lengths);
    for (int r = 0; r < s->requests; r++) {
        w->lengths[r] =
            s->exact_length ? s->exact_length : random_between(&w->random, s->query_len, s->max_length);
        w->blocks += (w->lengths[r] + s->block_size - 1) / s->block_size;
        longest = w->lengths[r] > longest ? w->lengths[r] : longest;
    }
    w->blocks += random_between(&w->random, 1, 3);
    w->columns = (longest + s->block_size - 1) / s->block_size + random_between(&w->random, 1, 3);
    w->regions = (longest + CSA_REGION - 1) / CSA_REGION + random_between(&w->random, 0, 3);
}

static void make_table(world *w)
{
    const world_shape *s = &w->shape;
    int32_t *free_blocks = malloc((size_t)w->blocks * sizeof *free_blocks), next = 0;
    for (int32_t i = 0; i < w->blocks; i++)
        free_blocks[i] = i;
    random_shuffle(&w->random, free_blocks, w->blocks);
    w->step.block_table = filled(w, "block_table", CSA_I32, 0, s->requests, (int)w->columns, -1, -1);
    for (int r = 0; r < s->requests; r++)
        for (int64_t column = 0; column < w->columns; column++) {
            int32_t junk[] = {-1, (int32_t)w->blocks, INT32_MAX, INT32_MIN};
            bool live = column * s->block_size < w->lengths[r];
            int32_t block = live ? free_blocks[next++] : junk[random_between(&w->random, 0, 3)];
            *(int32_t *)tensor_at(&w->step.block_table, r, column, 0, 0) = block;
        }
    free(free_blocks);
}

int64_t world_slot(const world *w, int64_t request, int64_t position)
{
    int64_t size = w->shape.block_size;
    int32_t block = *(const int32_t *)tensor_at(&w->step.block_table, request, position / size, 0, 0);
    return block * size + position % size;
}

static void make_tokens(world *w)
{
    const world_shape *s = &w->shape;
    int tokens = (int)w->tokens;
    csa_tokens *k = &w->step;
    k->size = sizeof *k;
    k->query_len = s->query_len;
    k->slots = filled(w, "slots", CSA_I64, 0, tokens, -1, -1, -1);
    k->positions = filled(w, "positions", CSA_I64, 0, tokens, -1, -1, -1);
    k->ring_base = filled(w, "ring_base", CSA_I64, 0, s->requests, -1, -1, -1);
    for (int64_t t = 0; t < w->tokens; t++) {
        int64_t request = t / s->query_len, position = w->lengths[request] - s->query_len + t % s->query_len;
        int64_t slot = world_slot(w, request, position);
        if (s->inactive && random_chance(&w->random, 30)) {
            bool by_slot = random_chance(&w->random, 50);
            slot = by_slot ? -random_between(&w->random, 1, 9) : slot;
            position = by_slot ? position : -random_between(&w->random, 1, 9);
        }
        *(int64_t *)tensor_at(&k->slots, t, 0, 0, 0) = slot;
        *(int64_t *)tensor_at(&k->positions, t, 0, 0, 0) = position;
    }
    for (int64_t r = 0; r < s->requests; r++) /* the last request's ring comes first */
        *(int64_t *)tensor_at(&k->ring_base, r, 0, 0, 0) = (s->requests - 1 - r) * s->ring_capacity + 1;
}

static void make_step(world *w)
{
    const world_shape *s = &w->shape;
    int t = (int)w->tokens, g = s->groups, h = s->heads, rows = (int)w->rows, regions = (int)w->regions;
    int columns = (s->topk < regions ? s->topk : regions) + 1;
    w->index_query = filled(w, "index query", CSA_E4M3, 1, t, g, s->index_heads, CSA_SUMMARY_SIZE);
    w->index_weights = filled(w, "index weights", CSA_F32, 1, t, g, s->index_heads, -1);
    w->query = filled(w, "query", CSA_BF16, 1, t, g, h, CSA_HEAD_SIZE);
    w->gate = filled(w, "gate", CSA_BF16, 1, t, g, h, -1);
    w->scale = 0.2F; /* more contrast than 192^-0.5 */
    w->scores = filled(w, "scores", CSA_F32, 0, rows, regions, -1, -1);
    w->selected = filled(w, "selected", CSA_I64, 0, rows, columns, -1, -1);
    w->out = filled(w, "out", CSA_BF16, 0, t, g, h, CSA_HEAD_SIZE);
    w->lse = filled(w, "lse", CSA_F32, 0, t, g, h, -1);
    w->rows_out.size = sizeof w->rows_out;
    w->rows_out.active = filled(w, "rows.active", CSA_BOOL, 0, rows, -1, -1, -1);
    w->rows_out.positions = filled(w, "rows.positions", CSA_I64, 0, rows, -1, -1, -1);
    w->rows_out.current = filled(w, "rows.current", CSA_I64, 0, rows, -1, -1, -1);
    w->rows_out.lengths = filled(w, "rows.lengths", CSA_I32, 0, rows, -1, -1, -1);
    w->rows_out.topk_lengths = filled(w, "rows.topk_lengths", CSA_I32, 0, rows, -1, -1, -1);
}

static void make_prepare(world *w)
{
    const world_shape *s = &w->shape;
    csa_prepare_args *p = &w->prepare;
    int t = (int)w->tokens, g = s->groups, h = s->heads, positions = (int)(w->columns * s->block_size);
    int index_heads = s->index_heads == 4 ? 4 : 2;
    *p = (csa_prepare_args){.size = sizeof *p, .tokens = &w->step, .cache = &w->cache, .eps = 1e-5F};
    p->index_query = filled(w, "prepare.index_query", CSA_BF16, 1, t, g, index_heads, CSA_SUMMARY_SIZE);
    p->index_key = filled(w, "index_key", CSA_BF16, 1, t, CSA_SUMMARY_SIZE, -1, -1);
    p->index_weights = filled(w, "prepare.index_weights", CSA_BF16, 1, t, g, index_heads, -1);
    p->index_query_norm = filled(w, "index_query_norm", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    p->index_key_norm = filled(w, "index_key_norm", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    p->index_key_bias = filled(w, "index_key_bias", CSA_BF16, 1, CSA_SUMMARY_SIZE, -1, -1, -1);
    p->index_rope = filled(w, "index_rope", CSA_F32, 0.7, positions, CSA_INDEX_ROTARY, -1, -1);
    p->index_query_out = filled(w, "index_query_out", CSA_E4M3, 0, t, g, CSA_INDEX_HEADS, CSA_SUMMARY_SIZE);
    p->index_key_out = filled(w, "index_key_out", CSA_BF16, 0, t, CSA_SUMMARY_SIZE, -1, -1);
    p->index_weights_out = filled(w, "index_weights_out", CSA_F32, 0, t, g, CSA_INDEX_HEADS, -1);
    p->query = filled(w, "prepare.query", CSA_BF16, 1, t, g, h, CSA_HEAD_SIZE);
    p->key = filled(w, "key", CSA_BF16, 1, t, g, CSA_HEAD_SIZE, -1);
    p->value = filled(w, "value", CSA_BF16, 1, t, g, CSA_HEAD_SIZE, -1);
    p->query_norm = filled(w, "query_norm", CSA_BF16, 1, CSA_HEAD_SIZE, -1, -1, -1);
    p->key_norm = filled(w, "key_norm", CSA_BF16, 1, CSA_HEAD_SIZE, -1, -1, -1);
    if (s->rotary > 0)
        p->rope = filled(w, "rope", CSA_BF16, 0.7, positions, s->rotary, -1, -1);
    p->query_out = filled(w, "query_out", CSA_BF16, 0, t, g, h, CSA_HEAD_SIZE);
    p->key_out = filled(w, "key_out", CSA_BF16, 0, t, g, CSA_HEAD_SIZE, -1);
    p->value_out = filled(w, "value_out", CSA_BF16, 0, t, g, CSA_HEAD_SIZE, -1);
    w->z = filled(w, "z", CSA_BF16, 1, t, CSA_SUMMARY_SIZE, -1, -1);
}

void world_make(world *w, world_shape shape, uint64_t number)
{
    memset(w, 0, sizeof *w);
    fill_in(&shape);
    w->shape = shape;
    w->random = random_of(number, 0x776F726C64);
    w->tokens = (int64_t)shape.requests * shape.query_len;
    w->rows = w->tokens * shape.groups;
    make_lengths(w);
    make_cache(w);
    make_table(w);
    make_tokens(w);
    make_step(w);
    make_prepare(w);
    csa_serving serving = world_serving(w);
    csa_context_options options = test_options((csa_context_options){0});
    CHECK_OK(csa_workspace_size(&options, &serving, &w->workspace.bytes));
    csa_tensor workspace = arena_tensor(&w->memory, "workspace", NULL, CSA_U8, 1,
                                        (int)(w->workspace.bytes ? w->workspace.bytes : 1));
    w->workspace.data = workspace.data;
}

void world_end(world *w)
{
    arena_check(&w->memory);
    arena_free(&w->memory);
    free(w->lengths);
    w->lengths = NULL;
}

csa_serving world_serving(const world *w)
{
    const world_shape *s = &w->shape;
    return (csa_serving){.size = sizeof(csa_serving),
                         .regions = w->regions,
                         .decode_tokens = w->tokens,
                         .prefill_tokens = w->tokens,
                         .groups = s->groups,
                         .heads = s->heads,
                         .index_heads = s->index_heads,
                         .block_size = s->block_size,
                         .topk = s->topk,
                         .kv_dtype = s->kv_dtype};
}

csa_score_args world_score(world *w)
{
    return (csa_score_args){.size = sizeof(csa_score_args),
                            .tokens = &w->step,
                            .cache = &w->cache,
                            .query = w->index_query,
                            .weights = w->index_weights,
                            .scores = w->scores,
                            .rows_out = &w->rows_out};
}

csa_select_args world_select(world *w)
{
    return (csa_select_args){.size = sizeof(csa_select_args),
                             .scores = w->scores,
                             .current = w->rows_out.current,
                             .selected = w->selected,
                             .topk = w->shape.topk};
}

csa_attend_args world_attend(world *w)
{
    return (csa_attend_args){.size = sizeof(csa_attend_args),
                             .tokens = &w->step,
                             .cache = &w->cache,
                             .query = w->query,
                             .selected = w->selected,
                             .gate = w->gate,
                             .out = w->out,
                             .lse = w->lse,
                             .scale = w->scale};
}

csa_step_args world_step(world *w)
{
    return (csa_step_args){.size = sizeof(csa_step_args),
                           .tokens = &w->step,
                           .cache = &w->cache,
                           .index_query = w->index_query,
                           .index_weights = w->index_weights,
                           .query = w->query,
                           .gate = w->gate,
                           .out = w->out,
                           .lse = w->lse,
                           .rows_out = &w->rows_out,
                           .selected = w->selected,
                           .regions = w->regions,
                           .topk = w->shape.topk,
                           .scale = w->scale,
                           .workspace = w->workspace};
}

csa_summarize_args world_summarize(world *w)
{
    return (csa_summarize_args){.size = sizeof(csa_summarize_args),
                                .tokens = &w->step,
                                .cache = &w->cache,
                                .key = w->prepare.index_key_out,
                                .z = w->z};
}

csa_layer_args world_layer(world *w)
{
    return (csa_layer_args){.size = sizeof(csa_layer_args),
                            .prepare = &w->prepare,
                            .z = w->z,
                            .gate = w->gate,
                            .out = w->out,
                            .lse = w->lse,
                            .rows_out = &w->rows_out,
                            .selected = w->selected,
                            .regions = w->regions,
                            .topk = w->shape.topk,
                            .scale = w->scale,
                            .workspace = w->workspace};
}

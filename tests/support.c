/* SPDX-License-Identifier: Apache-2.0 */
#include "support.h"

#include <inttypes.h>

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

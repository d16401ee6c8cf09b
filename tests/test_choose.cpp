/*
 * The selection of the cuda back end (src/cuda/device/choose.cuh) on the host, against a sort: all that it does
 * is integers, comparisons and barriers, so that what holds here holds there. Rows on both sides of each
 * threshold, scores with plateaus, NaN and infinities.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "emulated_block.hpp"

#include "cuda/device/choose_cluster.cuh"

#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace
{

using random_source = std::mt19937;

enum { SORTS = 12 };

/* Scores of usual and of wild magnitudes, a product's with signed weights, few values, one, much NaN,
 * infinities, a large and a small one beside each other, -infinity alone, numbers only at the start, neighbours
 * alike, the best ones last. */
std::vector<float> draw_scores(random_source &r, int count, int sort)
{
    std::normal_distribution<float> normal;
    std::vector<float> scores((size_t)count);
    float weights[4];
    for (float &w : weights)
        w = normal(r);
    for (int i = 0; i < count; i++) {
        float x = normal(r);
        switch (sort) {
        case 1:
            x = r() % 4 ? x * 1e-3F : x * 1e30F;
            break;
        case 2:
            x = 0;
            for (float w : weights)
                x += w * max(0.0F, normal(r));
            break;
        case 3:
            x = (float)(r() % 3);
            break;
        case 4:
            x = -0.0F;
            break;
        case 5:
            x = r() % 50 ? NAN : x;
            break;
        case 6:
            x = r() % 1000 ? x : r() % 2 ? INFINITY : -INFINITY;
            break;
        case 7:
            if (i >= 513 * 32 || (i % 64 != 31 && i % 64 != 32))
                x -= 50;
            else
                x = (i % 64 == 31 ? 100.0F : 2.0F) + (i < 128 ? 0.0F : 1e-4F * (float)i);
            break;
        case 8:
            x = -INFINITY;
            break;
        case 9:
            x = i < 600 ? x : -INFINITY;
            break;
        case 10:
            x = 3 * sinf((float)i / 40) + 0.01F * x;
            break;
        case 11:
            x = 0.01F * (float)i + x;
            break;
        default:
            break;
        }
        scores[(size_t)i] = x;
    }
    return scores;
}

/* As score leaves them. */
std::vector<float> find_peaks(const std::vector<float> &scores)
{
    std::vector<float> peaks((scores.size() + CSA_PEAK - 1) / CSA_PEAK, NAN);
    for (size_t i = 0; i < scores.size(); i++)
        peaks[i / CSA_PEAK] = fmaxf(peaks[i / CSA_PEAK], scores[i]);
    return peaks;
}

/* Section 5 by a sort. */
std::vector<int64_t> expect(const std::vector<float> &scores, int width)
{
    int current = (int)scores.size();
    std::vector<int> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    auto better = [&](int a, int b) {
        float x = scores[(size_t)a], y = scores[(size_t)b];
        if (std::isnan(x) || std::isnan(y))
            return std::isnan(x) == std::isnan(y) ? a < b : std::isnan(y);
        return x != y ? x > y : a < b;
    };
    if (current > width) {
        std::nth_element(order.begin(), order.begin() + width, order.end(), better);
        order.resize((size_t)width);
        std::sort(order.begin(), order.end());
    }
    std::vector<int64_t> columns((size_t)max(0, width - current), -1);
    columns.insert(columns.end(), order.begin(), order.end());
    columns.push_back(current);
    return columns;
}

/* Appends what must not count, as scratch has it: what longer rows left, which is like a row's last numbers. Up
 * to a multiple of 4, as rows of a step are, and some more; how many numbers there are then. */
int make_room(random_source &r, std::vector<float> &numbers)
{
    const float garbage[] = {INFINITY, 1e30F, NAN};
    size_t last = min(numbers.size(), (size_t)256), more = r() % 3 * 12;
    std::vector<float> like(numbers.end() - (int)last, numbers.end());
    while (numbers.size() % 4 || more > 0) {
        numbers.push_back(r() % 4 ? like[r() % last] : garbage[r() % 3]);
        more -= more > 0;
    }
    return (int)numbers.size();
}

template <int THREADS>
void choose(choice_scratch<THREADS> &s, const row_scores &row, int width, int64_t *columns)
{
    choose_list(s, row, width, columns, [] {});
}

template <int THREADS>
void choose(cluster_scratch<THREADS> &s, const row_scores &row, int width, int64_t *columns)
{
    open_cluster(s);
    choose_list_in_cluster(s, row, width, columns, [] {});
}

/* One row by so many blocks of THREADS; scratch and columns start as garbage, and so does what is behind the
 * scores. */
template <int THREADS, typename Scratch = choice_scratch<THREADS>>
bool choose_like_a_sort(random_source &r, int count, int width, int sort, bool with_peaks, size_t blocks = 1)
{
    std::vector<float> scores = draw_scores(r, count, sort), peaks = find_peaks(scores), shifted(1);
    shifted.insert(shifted.end(), scores.begin(), scores.end());
    bool shift = r() % 4 == 0; /* scores that are not aligned */
    std::vector<int64_t> columns((size_t)width + 1, -77), expected = expect(scores, width);
    bool alone = r() % 2; /* nothing past the end may be read */
    int room = alone ? count : make_room(r, shift ? shifted : scores) - shift;
    int peak_room = alone ? (int)peaks.size() : make_room(r, peaks);
    const float *values = shift ? shifted.data() + 1 : scores.data();
    bool aligned = (uintptr_t)values % 16 == 0 && (uintptr_t)peaks.data() % 16 == 0;
    row_scores row = {values, with_peaks ? peaks.data() : nullptr, count, room, peak_room, aligned};
    std::vector<Scratch> scratch(blocks);
    memset(static_cast<void *>(scratch.data()), 0xA5, blocks * sizeof(Scratch));
    int64_t *to = columns.data();
    run_cluster(scratch, THREADS, (uint32_t)r(), [=](Scratch &s) { choose(s, row, width, to); });
    if (columns == expected)
        return true;
    printf("wrong: %d regions, width %d, sort %d, %s peaks, %d threads, %d blocks, %s\n", count, width, sort,
           with_peaks ? "with" : "without", THREADS, (int)blocks, shift ? "not aligned" : "aligned");
    return false;
}

/* Rows that threads hold at once may have any width; of longer ones, the width's groups have to fit. */
template <int THREADS> bool draw_row(random_source &r, int count)
{
    bool fits = count <= choice_scratch<THREADS>::VALUES;
    const int widths[] = {1, THREADS / 2 + 3, THREADS, fits ? 1024 : choice_scratch<THREADS>::GROUPS};
    int width = widths[r() % 4], sort = (int)(r() % SORTS);
    return choose_like_a_sort<THREADS>(r, count, width, sort, r() % 2);
}

bool choose_in_cluster(random_source &r, int blocks, int count, int width, int sort)
{
    return choose_like_a_sort<128, cluster_scratch<128>>(r, count, width, sort, false, (size_t)blocks);
}

/* A row that a cluster holds, its last slices short or empty, too. */
bool draw_row_of_cluster(random_source &r, int sort)
{
    int blocks = 2 + (int)(r() % 4), most = blocks * choice_scratch<128>::VALUES;
    const int counts[] = {5, 60, 1030, most / 2 + 1, most - 37, most}, widths[] = {1, 50, 512, 1024};
    return choose_in_cluster(r, blocks, counts[r() % 6], widths[r() % 4], sort);
}

/* Somebody writes the lengths while the blocks of a cluster read them: each ends, and writes no other entries
 * than there may be. */
bool lengths_may_differ(random_source &r)
{
    enum { BLOCKS = 4, WIDTH = 50, MOST = BLOCKS * choice_scratch<128>::VALUES };
    std::vector<float> scores = draw_scores(r, MOST, (int)(r() % SORTS));
    std::vector<int64_t> columns(WIDTH + 1, -1);
    const int lengths[] = {-1, 0, WIDTH, WIDTH + 1, 700, MOST};
    int counts[BLOCKS];
    for (int &count : counts)
        count = lengths[r() % 6];
    std::vector<cluster_scratch<128>> scratch(BLOCKS);
    run_cluster(scratch, 128, (uint32_t)r(), [&](cluster_scratch<128> &s) {
        choose(s, {scores.data(), nullptr, counts[block_in_cluster()], MOST, 0, false}, WIDTH, columns.data());
    });
    auto wrong = [](int64_t entry) { return entry < -1 || entry > MOST; };
    return std::none_of(columns.begin(), columns.end(), wrong);
}

} // namespace

int main()
{
    const int counts[] = {1, 66, 129, 1030, 2047, 2048, 2049, 4097, 16384, 16385, 40001, 131073, 300000};
    const char *quick = getenv("CSA_TEST_QUICK");
    random_source r(20240607);
    int done = 0, wrong = 0;
    for (int count : counts)
        for (int i = 0; i < (quick ? 2 : 6); i++, done++)
            wrong += !(i % 3 == 2 ? draw_row<256>(r, count) : draw_row<128>(r, count));
    for (int i = 0; i < 40; i++, done++) /* whose last group is chosen, and ends early */
        wrong +=
            !choose_like_a_sort<128>(r, 2049 + i % 4 + 2056 * (i / 8), 1 + (int)(r() % 128), 11, i / 4 % 2);
    for (int i = 0; i < (quick ? 1 : 5) * SORTS; i++, done++)
        wrong += !draw_row_of_cluster(r, i % SORTS);
    for (int sort = 0; sort < SORTS; sort++, done++) /* slices full, more wanted than are numbers in sort 5 */
        wrong += !choose_in_cluster(r, 4, 8192 - sort, 400, sort);
    for (int i = 0; i < (quick ? 5 : 40); i++, done++)
        wrong += !lengths_may_differ(r);
    for (int i = 0; i < 2; i++, done++)
        wrong += i == 0 ? !choose_like_a_sort<1024>(r, 300000, 1024, 7, true)
                        : !choose_like_a_sort<512>(r, 300000, 512, 7, false);
    printf("%d selections, %d wrong\n", done, wrong);
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}

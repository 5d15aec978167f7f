// Random calls and what the layer must answer, as plain loops in double precision.
#pragma once

#include <cmath>

#include "random_delay.hpp"
#include "tables.hpp"

namespace native {

struct model {
    std::vector<float> w13, w2;  // [E, 2I, H], [E, H, I]
    model(const shape &s, uint64_t seed) {
        random_state random(seed);
        const auto fill = [&](std::vector<float> &to, int64_t count) {
            for (int64_t i = 0; i < count; ++i) to.push_back(float(random.below(2001) - 1000) / 1000.0f);
        };
        fill(w13, s.num_experts * 2 * s.intermediate * s.hidden);
        fill(w2, s.num_experts * s.hidden * s.intermediate);
    }
};

// One call of all ranks. Everything follows from (seed, number), so each rank makes it alone.
struct call_case {
    routing route;
    std::vector<float> tokens;  // [R*T, H]
    bool weights_before_l2 = false;
    bool empty = false;         // refused by somebody: nothing is launched
};

inline void draw_routing(const shape &s, random_state &random, routing &route) {
    const int64_t kind = random.below(8);  // 0: one hot expert, 1: one rank only, 2: nothing at all, else uniform
    const int64_t hot = random.below(s.num_experts);
    for (int rank = 0; rank < s.world; ++rank) {
        const int64_t count = random.below(4) == 0 ? 0 : random.below(s.max_tokens + 1);
        route.counts.push_back(kind == 2 || (kind == 1 && rank != hot % s.world) ? 0 : count);
    }
    for (int64_t pair = 0; pair < s.world * s.max_tokens * s.top_k; ++pair) {
        const int64_t any = random.below(s.num_experts + 2) - 1;  // -1 and num_experts are "not here"
        route.ids.push_back(int32_t(kind == 0 && random.below(4) != 0 ? hot : any));
        route.weights.push_back(float(random.below(1000)) / 500.0f);
    }
}

// The same tokens of each rank in another order: other tables of the same sizes, as frozen launches need.
inline void shuffle_rows(const shape &s, random_state &random, routing &route) {
    for (int64_t rank = 0; rank < s.world; ++rank) {
        for (int64_t token = route.counts[size_t(rank)] - 1; token > 0; --token) {
            const int64_t other = random.below(token + 1);
            for (int64_t j = 0; j < s.top_k; ++j) {
                std::swap(route.ids[size_t((rank * s.max_tokens + token) * s.top_k + j)],
                          route.ids[size_t((rank * s.max_tokens + other) * s.top_k + j)]);
            }
        }
    }
}

inline call_case make_case(const shape &s, uint64_t seed, uint64_t number, bool same_sizes) {
    call_case c;
    random_state random(seed * 1'000'003 + number);
    if (same_sizes) {
        random_state fixed(seed);
        do { c.route = {}; draw_routing(s, fixed, c.route); } while (c.route.counts[0] < 2);
        shuffle_rows(s, random, c.route);
    } else {
        draw_routing(s, random, c.route);
        c.empty = random.below(16) == 0;
    }
    for (int64_t i = 0; i < s.world * s.max_tokens * s.hidden; ++i) c.tokens.push_back(float(random.below(2001) - 1000) / 500.0f);
    c.weights_before_l2 = !same_sizes && random.below(2) == 0;
    return c;
}

// What one expert adds to one token.
inline void add_expert(const shape &s, const model &m, const float *x, int64_t expert, double weight, std::vector<double> &sum) {
    std::vector<double> activated;
    for (int64_t i = 0; i < s.intermediate; ++i) {
        double gate = 0, up = 0;
        for (int64_t h = 0; h < s.hidden; ++h) {
            gate += double(x[h]) * double(m.w13[size_t(((expert * 2) * s.intermediate + i) * s.hidden + h)]);
            up += double(x[h]) * double(m.w13[size_t(((expert * 2 + 1) * s.intermediate + i) * s.hidden + h)]);
        }
        activated.push_back(gate / (1 + std::exp(-gate)) * up);
    }
    for (int64_t h = 0; h < s.hidden; ++h) {
        for (int64_t i = 0; i < s.intermediate; ++i) {
            sum[size_t(h)] += weight * activated[size_t(i)] * double(m.w2[size_t((expert * s.hidden + h) * s.intermediate + i)]);
        }
    }
}

// True if `out` [T, H] of this rank is right; a NaN is not.
inline bool matches_oracle(const shape &s, const model &m, const call_case &c, int rank, const float *out) {
    for (int64_t token = 0; token < c.route.counts[size_t(rank)]; ++token) {
        const int64_t row = rank * s.max_tokens + token;
        std::vector<double> want(size_t(s.hidden), 0.0);
        for (int64_t j = 0; j < s.top_k; ++j) {
            const int32_t expert = c.route.ids[size_t(row * s.top_k + j)];
            if (expert < 0 || expert >= s.num_experts) continue;
            add_expert(s, m, c.tokens.data() + row * s.hidden, expert, c.route.weights[size_t(row * s.top_k + j)], want);
        }
        double error = 0, size = 0;
        for (int64_t h = 0; h < s.hidden; ++h) {
            const double difference = double(out[token * s.hidden + h]) - want[size_t(h)];
            error += difference * difference;
            size += want[size_t(h)] * want[size_t(h)];
        }
        if (!(std::sqrt(error) <= 1e-4 * (1 + std::sqrt(size)))) return false;
    }
    return true;
}

}  // namespace native

// A network between the ranks of one process that delivers writes as late and in as different an order as it may.
//
// Each rank sees the heaps of the others through views: memory of its own that nothing ever changes. So a remote load reads
// stale values for ever, and a remote store that does not go through the link is never delivered. What goes through the
// link waits in the writer's queue until a background thread delivers it: in any order, unless
//   - an earlier write to the same bytes is still under way (coherence),
//   - a fence of the writing thread lies before it and older writes of the rank are still under way (if fences order),
//   - it is a release store and older writes of the rank are still under way (if releases order).
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include "rank.hpp"

namespace native {

struct network_rules {
    bool fences_order = true, releases_order = true;
    bool loses_increments = false;
};

class network {
  public:
    network(network_rules rules, uint64_t seed) : rules_(rules), random_(seed) {}
    ~network() {
        stop_ = true;
        if (pump_.joinable()) pump_.join();
    }

    // After all views are there.
    void start() { pump_ = std::thread([this] { deliver(); }); }

    // The heap of `owner` as `viewer` sees it; returns the address of the view. Before any rank runs.
    char *add_view(int viewer, char *real, const heap_block &like, int64_t bytes) {
        views_.push_back({zeroed_block(bytes), real, viewer, bytes});
        std::memcpy(views_.back().memory.get(), like.get(), size_t(bytes));
        if (queues_.size() <= size_t(viewer)) queues_.resize(size_t(viewer) + 1);
        if (!queues_[size_t(viewer)]) queues_[size_t(viewer)] = std::make_unique<queue>();
        return views_.back().memory.get();
    }

    // False if `at` is no view: then it is the rank's own memory.
    bool copy(void *at, const void *from, int64_t bytes) { return send(at, from, bytes, false, false); }
    bool store_release(uint32_t *at, uint32_t value) { return send(at, &value, 4, rules_.releases_order, false); }
    bool add_release(uint32_t *at, uint32_t value) { return send(at, &value, 4, rules_.releases_order, true); }

    // The calling thread writes for one rank only, but which one shows only when it writes: mark the fence in all queues.
    void fence() {
        if (!rules_.fences_order) return;
        auto &marks = fence_marks();
        marks.resize(queues_.size());
        for (size_t i = 0; i < queues_.size(); ++i) {
            std::lock_guard hold(queues_[i]->lock);
            marks[i] = queues_[i]->next_number;
        }
    }

    int64_t delivered() const { return delivered_; }
    int64_t overtaken() const { return overtaken_; }
    int64_t lost() const { return lost_; }

  private:
    struct view { heap_block memory; char *real; int viewer; int64_t bytes; };
    struct write { uint64_t number, after; char *to; std::vector<char> bytes; bool add; uint64_t not_before_ns; };
    struct queue { std::mutex lock; std::vector<write> writes; uint64_t next_number = 0; };

    static std::vector<uint64_t> &fence_marks() {
        thread_local std::vector<uint64_t> marks;
        return marks;
    }

    const view *find(const void *at) const {
        for (const auto &v : views_) {
            if (at >= v.memory.get() && at < v.memory.get() + v.bytes) return &v;
        }
        return nullptr;
    }

    bool send(void *at, const void *from, int64_t bytes, bool after_all, bool add) {
        const view *v = find(at);
        if (!v) return false;
        auto &q = *queues_[size_t(v->viewer)];
        const auto &marks = fence_marks();
        thread_local random_state random(delay_seed.fetch_add(1, std::memory_order_relaxed));
        const int64_t kind = random.below(16);
        const uint64_t hold = kind < 8 ? 0 : uint64_t(random.below(kind < 15 ? 50'000 : 500'000));
        const char *begin = static_cast<const char *>(from);
        std::lock_guard guard(q.lock);
        const uint64_t number = q.next_number++;
        const uint64_t mark = marks.size() > size_t(v->viewer) ? marks[size_t(v->viewer)] : 0;
        q.writes.push_back({number, after_all ? number : mark, v->real + (static_cast<char *>(at) - v->memory.get()),
                            {begin, begin + bytes}, add, platform::now_ns() + hold});
        return true;
    }

    // Index of a write that may be delivered now, -1 if there is none.
    int64_t pick(const queue &q) {
        const int64_t count = int64_t(q.writes.size());
        const uint64_t now = platform::now_ns();
        const int64_t start = random_.below(count);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = (start + i) % count;
            const auto &w = q.writes[size_t(at)];
            if (w.not_before_ns > now || q.writes.front().number < w.after) continue;
            bool blocked = false;
            for (int64_t before = 0; before < at && !blocked; ++before) {
                const auto &other = q.writes[size_t(before)];
                blocked = other.to < w.to + w.bytes.size() && w.to < other.to + other.bytes.size();
            }
            if (!blocked) return at;
        }
        return -1;
    }

    void perform(const write &w) {
        auto *word = reinterpret_cast<uint32_t *>(w.to);
        uint32_t value;
        if (w.bytes.size() != 4) {
            std::memcpy(w.to, w.bytes.data(), w.bytes.size());
            return;
        }
        std::memcpy(&value, w.bytes.data(), 4);
        if (!w.add) return platform::store_release<platform::scope::system>(word, value);
        if (rules_.loses_increments && random_.below(8) == 0) ++lost_;
        else platform::red_release<platform::scope::system>(word, value);
    }

    void deliver() {
        while (!stop_) {
            bool idle = true;
            for (auto &q : queues_) {
                std::lock_guard hold(q->lock);
                for (int64_t burst = random_.below(6); burst >= 0 && !q->writes.empty(); --burst) {
                    const int64_t at = pick(*q);
                    if (at < 0) break;
                    perform(q->writes[size_t(at)]);
                    ++delivered_;
                    if (at > 0) ++overtaken_;
                    q->writes.erase(q->writes.begin() + at);
                    idle = false;
                }
            }
            if (idle) platform::nap_ns(5'000);
        }
    }

    network_rules rules_;
    random_state random_;
    std::vector<view> views_;
    std::vector<std::unique_ptr<queue>> queues_;
    std::atomic<bool> stop_{false};
    std::atomic<int64_t> delivered_{0}, overtaken_{0}, lost_{0};
    std::thread pump_;
};

inline network *the_network = nullptr;

// What the shipped wires stand on in these tests.
struct network_link {
    static void copy(void *to, const void *from, int64_t bytes, int lane, int lanes) {
        if (!the_network->copy(to, from, bytes)) platform::copy_bytes(to, from, bytes, lane, lanes);
    }
    static void fence() {
        platform::fence<platform::scope::system>();
        the_network->fence();
    }
    static void store_release(uint32_t *slot, uint32_t value) {
        if (!the_network->store_release(slot, value)) platform::store_release<platform::scope::system>(slot, value);
    }
    static void add_release(uint32_t *counter, uint32_t count) {
        if (!the_network->add_release(counter, count)) platform::red_release<platform::scope::system>(counter, count);
    }
};

}  // namespace native

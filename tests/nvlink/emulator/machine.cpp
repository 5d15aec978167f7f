// Fibers of the emulated GPU (x86-64).
#include "machine.hpp"

#include <cstdio>
#include <deque>
#include <random>

#include "scheduler.hpp"

extern "C" void emulator_switch(void **save, void *load);
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

namespace emulator {

fiber *current;
uint64_t now, idle;

namespace {

constexpr size_t STACK_BYTES = 24 * 1024;
void *main_stack;
std::deque<fiber *> ready;
std::vector<char *> free_stacks;
std::mt19937 draw;
int live;

void to_main() { emulator_switch(&current->stack_pointer, main_stack); }
void entry() {
    shared_block *shared = current->of_cluster ? &current->of_cluster->blocks[current->block.x] : nullptr;
    if (shared) ++shared->begun;
    current->body();
    if (shared) ++shared->ended;
    if (current->store_groups.size() > 1) fail("a thread ends before its bulk stores are complete");
    current->done = true;
    to_main();
}

}  // namespace

void fail(const char *what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
}
void something_happened() { idle = 0; }
void yield() {
    ready.push_back(current);
    to_main();
}
void linger() {
    constexpr uint64_t NAPS = 4000;  // of all fibers, in a row
    yield();
    if (draw() % 4 == 0)
        while (idle < NAPS) ++idle, yield();
}
void meet(meeting &m) {
    if (++m.come < m.need) {
        m.waiting.push_back(current);
        return to_main();
    }
    m.come = 0, idle = 0;
    ready.insert(ready.end(), m.waiting.begin(), m.waiting.end());
    m.waiting.clear();
}
void complete_stores(size_t left) {
    auto &groups = current->store_groups;
    while (groups.size() - 1 > left) {
        for (const bulk_store &s : groups.front()) std::memcpy(s.to, s.from, s.bytes);
        groups.erase(groups.begin());
    }
}

void start(fiber *f) {
    if (free_stacks.empty()) free_stacks.push_back(static_cast<char *>(std::malloc(STACK_BYTES)));
    f->stack = free_stacks.back(), free_stacks.pop_back();
    void **top = reinterpret_cast<void **>(reinterpret_cast<uintptr_t>(f->stack + STACK_BYTES) & ~uintptr_t(15));
    *--top = nullptr, *--top = reinterpret_cast<void *>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    f->stack_pointer = top;
    ++live;
    ready.push_back(f);
}

int run_all(int seed, uint64_t most_idle) {
    draw.seed(seed), now = idle = 0;
    while (live > 0) {
        if (ready.empty() || idle > most_idle) return live;
        if (draw() % 4 == 0) std::swap(ready.front(), ready[draw() % std::min<size_t>(ready.size(), 64)]);
        fiber *f = current = ready.front();
        ready.pop_front();
        if (warp *w = f->of_warp) {  // a warp may be slow at any place
            if (draw() % 4096 == 0) w->behind = 32 * (draw() % 64);
            if (w->behind > 0) {
                --w->behind, ready.push_back(f);
                continue;
            }
        }
        emulator_switch(&main_stack, f->stack_pointer);
        if (!f->done) continue;
        free_stacks.push_back(f->stack);
        delete f;
        --live, idle = 0;
    }
    return 0;
}

}  // namespace emulator

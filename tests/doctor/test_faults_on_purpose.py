"""The mistakes that GPU tests make on purpose reach the kernel: the plain C++ part of the probe, compiled for the host."""

from __future__ import annotations

import subprocess

from moe_tk.builder.native_root import native_root
from moe_tk.builder.toolchain import find_host_compiler

PROGRAM = r"""
#include <cstdio>
#include <initializer_list>
#include "tk_kernels/probe/verify_plan.hpp"
using namespace moe_tk_probe;

int main() {
    constexpr uint64_t WORDS = 512;
    for (int fault : {NO_FAULT, WRONG_WORD, NO_FLAG}) {
        int wrong = 0, flags = 0;
        long place = -1;
        uint64_t difference = 0;
        for (int round = 0; round < 3; ++round) {
            word16 source, target;
            uint32_t arrivals, flag;
            finding out;
            const verify_request request{3, 5, true, true, WORDS * 16, 1.5, fault};
            const verify_args a = args_of(request, {&source, &target, &arrivals, &flag, &out}, round);
            if (a.source != &source || a.target != &target || a.arrivals != &arrivals || a.flag != &flag || a.out != &out) return 1;
            if (a.words != WORDS || a.epoch != uint32_t(round + 1) || a.limit_ns != 1500000000 || a.bulk != 1) return 2;
            if (a.fault != fault || a.seed != seed_of(round) || (round && a.seed == seed_of(round - 1))) return 3;
            for (uint64_t w = 0; w < WORDS; ++w) {
                const word16 seen = written(a, w), want = pattern(w, a.seed);
                if (seen.x == want.x && seen.y == want.y) continue;
                ++wrong;
                place = long(w);
                difference = seen.x ^ want.x;
            }
            for (uint32_t before = 8 * round; before < 8u * round + 8; ++before) flags += sends_flag(a, before, 8);
        }
        std::printf("%d %d %ld %d %d\n", fault, wrong, place, int(difference), flags);
    }
}
"""


def test_doc_15_and_17_faults_on_purpose_reach_the_arguments(tmp_path):
    source, program = tmp_path / "faults.cpp", tmp_path / "faults"
    source.write_text(PROGRAM)
    compiler = find_host_compiler().require()
    subprocess.run([*compiler.command, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{native_root()}", str(source), "-o",
                    str(program)], check=True, timeout=120)
    done = subprocess.run([str(program)], stdout=subprocess.PIPE, text=True, timeout=20)
    assert done.returncode == 0, f"check {done.returncode} of the program failed"
    # fault, wrong words in three rounds, place of the last, its difference, flags in three rounds
    assert done.stdout.splitlines() == ["0 0 -1 0 3", "1 3 256 1 3", "2 0 -1 0 0"]

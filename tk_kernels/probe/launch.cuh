// One mover on one GPU: its buffers, its stream, its launch, and what it measured.
#pragma once

#include <algorithm>
#include <vector>

#include "move.cuh"

namespace moe_tk_probe {

struct mover_request {
    int device;
    int push;     // 1 push, 0 pull
    int bulk;     // bulk copies, else 16-byte accesses
    int payload;  // COPY, WIRE or PARKED
    int blocks;
    int num_peers;
    int peers[MAX_PEERS]; // device indices; HOST for pinned host memory
};

// Two words of host memory that all movers of a measurement look at.
struct gate {
    buffer words{HOST, 256};
    gate() { words.fill(0); }
    uint32_t *go() const { return words.as<uint32_t>(); }
    uint32_t *stop() const { return words.as<uint32_t>() + 32; }
    void set(uint32_t *word) const { *static_cast<volatile uint32_t *>(word) = 1; }
    void clear() const { words.fill(0); }
};

class mover {
public:
    mover(const mover_request &request, uint64_t bytes)
        : request_(request), bytes_(bytes), stream_(request.device),
          records_(request.device, sizeof(uint64_t) * 3 * request.blocks + 64) {
        if (request.num_peers < 1 || request.num_peers > MAX_PEERS) throw std::runtime_error("mover: 1 to 16 peers");
        if (request.bulk && !has_bulk(request.device)) {
            throw std::runtime_error("mover: bulk copies need compute capability 9.0");
        }
        for (int i = 0; i < request.num_peers; ++i) {
            enable_peer(request.device, request.peers[i]);
            buffers_.emplace_back(request.push ? request.device : request.peers[i], bytes);
            buffers_.emplace_back(request.push ? request.peers[i] : request.device, bytes);
            buffers_[2 * i].fill(0x3c + i);
            buffers_[2 * i + 1].fill(0);
        }
        pick_kernel();
    }

    // passes == 0: runs until gate.stop.
    void launch(const gate &g, uint64_t passes, double limit_s) {
        move_args a{};
        for (int i = 0; i < request_.num_peers; ++i) {
            a.from[i] = buffers_[2 * i].as<const char>();
            a.to[i] = buffers_[2 * i + 1].as<char>();
        }
        a.num_peers = request_.num_peers;
        a.push = request_.push;
        a.bytes = bytes_;
        a.passes = passes;
        a.limit_ns = uint64_t(limit_s * 1e9);
        a.go = g.go();
        a.stop = g.stop();
        a.began = records_.as<uint64_t>();
        a.ended = a.began + request_.blocks;
        a.chunks = a.ended + request_.blocks;
        a.sink = reinterpret_cast<uint32_t *>(a.chunks + request_.blocks);
        MOE_TK_PROBE_CHECK(cudaSetDevice(request_.device));
        MOE_TK_PROBE_CHECK(cudaMemsetAsync(records_.as(), 0, records_.bytes(), stream_.get()));
        kernel_<<<request_.blocks, threads_, shared_, stream_.get()>>>(a);
        MOE_TK_PROBE_CHECK(cudaGetLastError());
    }

    // After launch() and the gate: waits for the end; GB/s of this mover over its own first start to last end.
    double rate() {
        stream_.wait();
        std::vector<uint64_t> records(3 * request_.blocks);
        MOE_TK_PROBE_CHECK(cudaMemcpy(records.data(), records_.as(), records.size() * 8, cudaMemcpyDefault));
        const auto at = [&](int part) { return records.begin() + part * request_.blocks; };
        const uint64_t began = *std::min_element(at(0), at(1)), ended = *std::max_element(at(1), at(2));
        uint64_t chunks = 0;
        for (auto it = at(2); it != records.end(); ++it) chunks += *it;
        if (request_.payload == PARKED || ended <= began) return 0;
        return double(chunks) * (request_.bulk ? BULK_CHUNK : WORD_CHUNK) / double(ended - began);
    }

    uint64_t bytes_per_pass() const { return bytes_ * request_.num_peers; }

private:
    using kernel = void (*)(move_args);

    // The ring takes what the GPU offers: 12 stages (192 KiB) where they fit, else 6 (96 KiB).
    void pick_kernel() {
        const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, request_.device);
        const bool parked = request_.payload == PARKED; // occupies what the same mover would occupy
        if (request_.bulk) {
            const bool large = most >= int(12 * BULK_CHUNK + 4096);
            threads_ = 128;
            shared_ = (large ? 12 : 6) * BULK_CHUNK + 128;
            kernel_ = parked                      ? move_words_kernel<PARKED>
                      : request_.payload == COPY ? (large ? move_bulk_kernel<COPY, 12> : move_bulk_kernel<COPY, 6>)
                                                  : (large ? move_bulk_kernel<WIRE, 12> : move_bulk_kernel<WIRE, 6>);
        } else {
            threads_ = MOVE_THREADS;
            shared_ = most / 2 + 1024; // one block per SM, and no GEMM block beside it
            kernel_ = parked                      ? move_words_kernel<PARKED>
                      : request_.payload == COPY ? move_words_kernel<COPY>
                                                  : move_words_kernel<WIRE>;
        }
        MOE_TK_PROBE_CHECK(cudaSetDevice(request_.device));
        MOE_TK_PROBE_CHECK(cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_));
        int per_sm = 0;
        MOE_TK_PROBE_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel_, threads_, shared_));
        if (per_sm * attribute(cudaDevAttrMultiProcessorCount, request_.device) < request_.blocks) {
            throw std::runtime_error("mover: " + std::to_string(request_.blocks) + " blocks cannot all be resident");
        }
    }

    mover_request request_;
    uint64_t bytes_;
    stream stream_;
    buffer records_;
    std::vector<buffer> buffers_; // from, to, from, to, ...
    kernel kernel_ = nullptr;
    int threads_ = 0, shared_ = 0;
};

} // namespace moe_tk_probe

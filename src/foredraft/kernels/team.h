// The threads of one pass.

#pragma once

#include <atomic>
#include <cstdint>
#include <omp.h>
#include <sched.h>

#include "base.h"

namespace {

constexpr int SPINS = 1000;  // checks of a barrier before the thread yields the processor: some 20 microseconds

// OpenMP's own barrier spins for milliseconds, which starves the thread it waits for if processors are shared.
struct Barrier {
    alignas(ALIGN) std::atomic<int> arrived{0};
    alignas(ALIGN) std::atomic<int> round{0};
    void wait(int size) {
        const int mine = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == mine;)
            if (++spins < SPINS) _mm_pause(); else sched_yield();
    }
};

struct Team {
    int rank, size;
    Barrier* barrier;
    void wait() const { barrier->wait(size); }
    void share(int64_t count, int64_t& first, int64_t& last) const {
        first = count * rank / size;
        last = count * (rank + 1) / size;
    }
};

template <class Run>
void with_team(int64_t num_threads, const Run& run) {
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    run(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}

template <class Run>
void alone(const Run& run) {
    Barrier barrier;
    run(Team{0, 1, &barrier});
}

}  // namespace

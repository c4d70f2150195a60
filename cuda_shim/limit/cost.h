/* SPDX-License-Identifier: Apache-2.0 */
/* What a launch costs: GPU time per (function, grid), learned from the driver's own events.
 *
 * One table per process. A kernel's cost is the smallest of its recent samples: on a shared device an event pair also measures the
 * neighbour's slices, and a tenant must not pay for being preempted. Two windows of samples rotate, so that the minimum forgets, and a
 * kernel that became dearer is believed after one window.
 *
 * One function and grid may also do much work and little work alternately (a persistent kernel has one grid for every problem). So a launch
 * costs at least half of the mean, even if the minimum is lower: one neighbour stretches a kernel by no more. The settlement with the
 * driver's figures (control.h) takes the rest, or gives back. The first window does not have this rule, because first launches also load
 * code.
 *
 * A program may launch one function with ever new grids, and with more of them than the table holds. So all samples of a function count for
 * the function too: a grid that has not been measured yet costs what the function does, and one for which there is no room is counted as
 * the function.
 *
 * Reading and learning are lock-free. When there is no room for a function either, its launches are unknown, always: each is timed and
 * settled (settle.h).
 */
#ifndef AQ_LIMIT_COST_H
#define AQ_LIMIT_COST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_COST_ENTRIES 4096u /* power of two */
#define AQ_COST_WINDOW 16u       /* samples per window of the minimum */
#define AQ_COST_MEAN_PART 2u     /* of the mean, that a launch costs at least */
#define AQ_COST_EAGER AQ_COST_WINDOW /* launches of a new key that are all sampled: the first window, in which the minimum is believed */
#define AQ_COST_EVERY 61u        /* then every 61st … */
#define AQ_COST_EVERY_STABLE 1021u /* … and every 1021st once two windows agree; primes, so that all of a program's rounds come up */

struct aq_cost_entry {
	_Atomic uint64_t key;          /* 0 = free */
	_Atomic uint32_t launches;
	_Atomic uint32_t sample_at;    /* the launch that is timed next */
	_Atomic uint32_t samples;      /* in the current window */
	_Atomic uint32_t stable;       /* the last two windows agree within an eighth, and the mean is not far from them */
	_Atomic uint64_t estimate_ns;  /* 0 = not learned */
	_Atomic uint64_t window_min_ns;
	_Atomic uint64_t previous_min_ns;
	_Atomic uint64_t mean_ns;      /* of about the last AQ_COST_WINDOW samples; 0 = in the first window */
	struct aq_cost_entry *_Atomic of_function; /* which learns with it and replaces it; NULL = no such entry */
};

struct aq_cost_table {
	struct aq_cost_entry entries[AQ_COST_ENTRIES];
};

/* The entry of a function and launch shape, made if there is room; the function's if not, and NULL when there is no room for that. */
struct aq_cost_entry *aq_cost_find(struct aq_cost_table *table, const void *function, uint64_t blocks, uint32_t threads_per_block);

/* What the samples of a function's other shapes predict for one without samples; `fallback_ns` without any samples. */
uint64_t aq_cost_of_function(const struct aq_cost_entry *entry, uint64_t fallback_ns);

/* GPU time to pay for one launch. `fallback_ns` is for functions that have not been measured yet. */
static inline uint64_t aq_cost_estimate(const struct aq_cost_entry *entry, uint64_t fallback_ns)
{
	uint64_t estimate = entry ? atomic_load_explicit(&entry->estimate_ns, memory_order_relaxed) : 0;

	return __builtin_expect(estimate != 0, 1) ? estimate : aq_cost_of_function(entry, fallback_ns);
}

/* Do its launches take so different times that the mean decides what they cost? */
static inline bool aq_cost_is_uneven(const struct aq_cost_entry *entry)
{
	uint64_t mean = atomic_load_explicit(&entry->mean_ns, memory_order_relaxed);

	return mean && mean / AQ_COST_MEAN_PART >= atomic_load_explicit(&entry->estimate_ns, memory_order_relaxed);
}

/* Count a launch. True when this one should be timed. */
static inline bool aq_cost_wants_sample(struct aq_cost_entry *entry)
{
	uint32_t launch = atomic_load_explicit(&entry->launches, memory_order_relaxed);

	/* Two threads may count one launch for two: cheaper than a locked add, and only the choice of samples hangs on it. */
	atomic_store_explicit(&entry->launches, launch + 1, memory_order_relaxed);
	if ((int32_t)(launch - atomic_load_explicit(&entry->sample_at, memory_order_relaxed)) < 0)
		return false;
	uint32_t every = atomic_load_explicit(&entry->stable, memory_order_relaxed) ? AQ_COST_EVERY_STABLE : AQ_COST_EVERY;
	bool is_new = launch + 1 < AQ_COST_EAGER;
	atomic_store_explicit(&entry->sample_at, launch + (is_new ? 1 : every), memory_order_relaxed);
	return true;
}

/* A new object has the handle that this function, or graph, may have had before. */
void aq_cost_forget(struct aq_cost_table *table, const void *function);

/* Take in one measured duration. */
void aq_cost_learn(struct aq_cost_entry *entry, uint64_t measured_ns);

#endif

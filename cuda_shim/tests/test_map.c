/* SPDX-License-Identifier: Apache-2.0 */
/* The map of what a process holds: against a plain array, with growth, removal in clusters, and many threads. */
#include <pthread.h>
#include <string.h>

#include "account/map.h"
#include "tests/support.h"

#define KEYS 4096u
#define STEPS 400000u
#define THREADS 8u
#define ROUNDS 20000u

static uint64_t key_of(uint32_t i)
{
	return 0x7f0000000000ull + (uint64_t)i * 512; /* as neighbouring allocations lie */
}

static void behaves_like_an_array(void)
{
	static struct aq_map map;
	static uint64_t held[KEYS];
	struct aq_entry entry;
	uint32_t random = 1;

	for (uint32_t step = 0; step < STEPS; step++) {
		uint32_t i = support_random(&random) % KEYS;
		bool found;

		switch (support_random(&random) % 3) {
		case 0:
			held[i] = step + 1;
			CHECK(aq_map_put(&map, &(struct aq_entry){ .key = key_of(i), .bytes = held[i], .device = i }));
			break;
		case 1:
			found = aq_map_take(&map, key_of(i), &entry);
			CHECK(found == (held[i] != 0));
			CHECK(!found || (entry.bytes == held[i] && entry.device == i));
			held[i] = 0;
			break;
		default:
			found = aq_map_get(&map, key_of(i), &entry);
			CHECK(found == (held[i] != 0));
			CHECK(!found || entry.bytes == held[i]);
		}
	}
}

static void zero_is_no_key(void)
{
	static struct aq_map map;
	struct aq_entry entry;

	CHECK(!aq_map_take(&map, 0, &entry));
	CHECK(!aq_map_get(&map, 0, &entry));
	CHECK(!aq_map_put(&map, &(struct aq_entry){ .key = 0, .bytes = 1 }));
}

struct drained {
	uint32_t device;
	uint64_t bytes;
	unsigned count;
};

static bool is_of_device(const struct aq_entry *entry, void *context)
{
	return entry->device == ((const struct drained *)context)->device;
}

static void add_up(const struct aq_entry *entry, void *context)
{
	struct drained *drained = context;

	drained->bytes += entry->bytes;
	drained->count++;
}

static void draining_removes_exactly_the_matching_entries(void)
{
	static struct aq_map map;
	struct drained drained = { .device = 1 };
	struct aq_entry entry;

	for (uint32_t i = 0; i < KEYS; i++)
		CHECK(aq_map_put(&map, &(struct aq_entry){ .key = key_of(i), .bytes = i, .device = i % 2 }));
	aq_map_drain(&map, is_of_device, add_up, &drained);
	CHECK(drained.count == KEYS / 2);
	CHECK(drained.bytes == (uint64_t)KEYS * KEYS / 4);
	for (uint32_t i = 0; i < KEYS; i++)
		CHECK(aq_map_get(&map, key_of(i), &entry) == (i % 2 == 0));
}

static struct aq_map shared;

static void *put_and_take(void *argument)
{
	uint32_t thread = (uint32_t)(uintptr_t)argument;
	struct aq_entry entry;

	for (uint32_t round = 0; round < ROUNDS; round++) {
		uint64_t key = key_of(thread + THREADS * (round % 512));

		CHECK(aq_map_put(&shared, &(struct aq_entry){ .key = key, .bytes = round, .owner = thread }));
		CHECK(aq_map_take(&shared, key, &entry));
		CHECK(entry.bytes == round && entry.owner == thread);
	}
	return NULL;
}

static void threads_find_their_own(void)
{
	pthread_t threads[THREADS];

	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, put_and_take, (void *)i) == 0);
	for (unsigned i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

static bool is_odd(const struct aq_entry *entry, void *context)
{
	(void)context;
	return entry->bytes % 2;
}

static void matching_entries_are_listed_up_to_a_number_and_stay(void)
{
	static struct aq_map map;
	struct aq_entry listed[200], found;

	for (uint64_t i = 1; i <= 300; i++)
		CHECK(aq_map_put(&map, &(struct aq_entry){ .key = i << 21, .bytes = i }));
	CHECK(aq_map_list(&map, is_odd, NULL, listed, 200) == 150);
	uint64_t sum = 0;
	for (unsigned i = 0; i < 150; i++) {
		CHECK(listed[i].key == listed[i].bytes << 21);
		sum += listed[i].bytes;
	}
	CHECK(sum == 150 * 150); /* each odd number once */
	CHECK(aq_map_list(&map, is_odd, NULL, listed, 7) == 7);
	CHECK(aq_map_get(&map, listed[0].key, &found) && found.bytes == listed[0].bytes);
}

int main(void)
{
	behaves_like_an_array();
	zero_is_no_key();
	draining_removes_exactly_the_matching_entries();
	threads_find_their_own();
	matching_entries_are_listed_up_to_a_number_and_stay();
	return 0;
}

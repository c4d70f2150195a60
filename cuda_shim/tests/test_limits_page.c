/* SPDX-License-Identifier: Apache-2.0 */
/* The limits page: what is accepted, what is refused and why, and that a reader never sees half an update. */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>

#include "region/limits.h"
#include "tests/support.h"

#define UPDATES 2000u
#define READERS 3u

static struct support_page page;

static int map_with(void (*change)(struct support_page *), bool with_checksum, struct aq_limits *limits, struct aq_fault *fault)
{
	support_page(&page, 2, 64 * MIB);
	change(&page);
	if (with_checksum)
		page.header.checksum = support_checksum(&page);
	support_write_limits(support_limits(), &page);
	return aq_limits_map(limits, support_limits(), fault);
}

static void nothing(struct support_page *p)
{
	(void)p;
}

static void other_magic(struct support_page *p)
{
	p->header.magic = 1;
}

static void newer_major(struct support_page *p)
{
	p->header.abi_major = AQ_ABI_MAJOR + 1;
}

static void newer_minor(struct support_page *p)
{
	p->header.abi_minor = AQ_ABI_MINOR + 1;
}

static void too_many_devices(struct support_page *p)
{
	p->header.device_count = AQ_MAX_DEVICES + 1;
}

static void short_stride(struct support_page *p)
{
	p->header.device_stride = 8;
}

static void one_bit_off(struct support_page *p)
{
	p->device[1].memory_bytes ^= 1;
}

static void being_written(struct support_page *p)
{
	p->header.generation = 3;
}

static void bad_uuid(struct support_page *p)
{
	p->device[0].uuid[10] = 'x';
}

static void with_overhead(struct support_page *p)
{
	p->device[0].overhead_bytes = 4 * MIB;
	p->device[1].overhead_bytes = 1000 * MIB;
}

static void damage_is_refused_with_its_reason(void)
{
	static const struct {
		void (*change)(struct support_page *);
		bool with_checksum;
		const char *says;
	} cases[] = {
		{ other_magic, true, "magic" },       { newer_major, true, "ABI version" }, { too_many_devices, true, "do not fit" },
		{ short_stride, true, "do not fit" }, { one_bit_off, false, "checksum" },   { being_written, true, "being written" },
		{ bad_uuid, true, "UUID" },
	};
	struct aq_limits limits;
	struct aq_fault fault;

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		CHECK(map_with(cases[i].change, cases[i].with_checksum, &limits, &fault) == -1);
		if (!strstr(fault.text, cases[i].says)) {
			fprintf(stderr, "case %zu says: %s\n", i, fault.text);
			exit(1);
		}
		aq_limits_unmap(&limits);
	}
}

static void short_file_is_reported_as_truncated(void)
{
	struct aq_limits limits;
	struct aq_fault fault;

	support_page(&page, 1, MIB);
	support_write_limits(support_limits(), &page);
	CHECK(truncate(support_limits(), 100) == 0);
	CHECK(aq_limits_map(&limits, support_limits(), &fault) == -1);
	CHECK(strstr(fault.text, "truncated"));
	aq_limits_unmap(&limits);
	/* Long enough for the header, too short for the devices it announces. */
	support_write_limits(support_limits(), &page);
	CHECK(truncate(support_limits(), 256) == 0);
	CHECK(aq_limits_map(&limits, support_limits(), &fault) == -1);
	CHECK(strstr(fault.text, "do not fit"));
	aq_limits_unmap(&limits);
}

static void a_newer_minor_version_is_read(void)
{
	struct aq_limits limits;
	struct aq_fault fault;

	CHECK(map_with(newer_minor, true, &limits, &fault) == 0);
	aq_limits_unmap(&limits);
}

static void overhead_lowers_the_limit_to_zero_at_least(void)
{
	struct aq_limits limits;
	struct aq_fault fault;

	CHECK(map_with(with_overhead, true, &limits, &fault) == 0);
	CHECK(limits.device[0].memory_bytes == 60 * MIB);
	CHECK(limits.device[1].memory_bytes == 0);
	aq_limits_unmap(&limits);
}

static void devices_are_found_by_uuid(void)
{
	unsigned char uuid[16];
	struct aq_limits limits;
	struct aq_fault fault;

	CHECK(map_with(nothing, true, &limits, &fault) == 0);
	CHECK(aq_uuid_parse(FIRST_UUID, uuid));
	uuid[15] = 0xf1;
	CHECK(aq_limits_find(&limits, uuid) == 1);
	uuid[15] = 0xf2;
	CHECK(aq_limits_find(&limits, uuid) == -1);
	CHECK(aq_uuid_parse("MIG-00112233-4455-6677-8899-AABBCCDDEEFF", uuid));
	CHECK(!aq_uuid_parse("GPU-0011", uuid));
	CHECK(!aq_uuid_parse("", uuid));
	aq_limits_unmap(&limits);
}

/* ---- updates while others read --------------------------------------------------------------------------------- */

static struct aq_limits watched;
static _Atomic bool done;

/* As the agent does, through its own mapping, with a checksum that matches only when all words are of one update. */
static void update(struct support_page *mapped, uint64_t bytes)
{
	uint64_t generation = atomic_load(&mapped->header.generation);

	atomic_store(&mapped->header.generation, generation | 1);
	page.device[0].memory_bytes = page.device[1].memory_bytes = bytes;
	for (unsigned i = 0; i < 2; i++)
		__atomic_store_n(&mapped->device[i].memory_bytes, bytes, __ATOMIC_RELAXED);
	atomic_store_explicit(&mapped->header.checksum, support_checksum(&page), memory_order_relaxed);
	atomic_store(&mapped->header.generation, (generation | 1) + 1);
}

static void *read_limits(void *unused)
{
	uint64_t last = 0;

	(void)unused;
	while (!atomic_load(&done)) {
		if (aq_limits_changed(&watched))
			aq_limits_refresh(&watched);
		uint64_t seen = atomic_load(&watched.device[0].memory_bytes);
		CHECK(seen >= last); /* updates only grow: an older or a torn value would show */
		last = seen;
	}
	return NULL;
}

static void readers_see_whole_updates_only(void)
{
	pthread_t readers[READERS];
	struct aq_fault fault;

	support_page(&page, 2, 1);
	support_write_limits(support_limits(), &page);
	CHECK(aq_limits_map(&watched, support_limits(), &fault) == 0);
	int fd = open(support_limits(), O_RDWR | O_CLOEXEC);
	struct support_page *mapped = mmap(NULL, sizeof(*mapped), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(mapped != MAP_FAILED);
	for (unsigned i = 0; i < READERS; i++)
		CHECK(pthread_create(&readers[i], NULL, read_limits, NULL) == 0);
	for (uint64_t i = 2; i < UPDATES; i++)
		update(mapped, i << 32 | i);
	atomic_store(&done, true);
	for (unsigned i = 0; i < READERS; i++)
		CHECK(pthread_join(readers[i], NULL) == 0);
	aq_limits_refresh(&watched);
	CHECK(watched.device[1].memory_bytes == ((uint64_t)(UPDATES - 1) << 32 | (UPDATES - 1)));

	/* A writer that was killed while writing: the old copy stays, and no reader waits. */
	atomic_fetch_or(&mapped->header.generation, 1);
	mapped->device[0].memory_bytes = 7;
	CHECK(aq_limits_changed(&watched));
	CHECK(!aq_limits_refresh(&watched));
	CHECK(watched.device[0].memory_bytes == watched.device[1].memory_bytes);
	/* Its successor finishes the job. */
	update(mapped, 9ull << 32 | 9);
	CHECK(aq_limits_refresh(&watched));
	CHECK(watched.device[0].memory_bytes == (9ull << 32 | 9));
	munmap(mapped, sizeof(*mapped));
	close(fd);
	aq_limits_unmap(&watched);
}

int main(void)
{
	support_directory();
	damage_is_refused_with_its_reason();
	short_file_is_reported_as_truncated();
	a_newer_minor_version_is_read();
	overhead_lowers_the_limit_to_zero_at_least();
	devices_are_found_by_uuid();
	readers_see_whole_updates_only();
	support_remove();
	return 0;
}

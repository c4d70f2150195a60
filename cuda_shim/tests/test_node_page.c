/* SPDX-License-Identifier: Apache-2.0 */
/* The node's pages while a container that may write them does its worst: no other is harmed, and a repaired page works again. */
#define _GNU_SOURCE /* F_SETLEASE */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "interpose/neighbours.h"
#include "tests/support.h"

#define MS 1000000ll
#define GIB (1024 * MIB)
#define LINE 3u
#define WORKERS 4
#define TORMENT_NS (300 * MS)

static char path[4096];

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* As the agent does it: over the old content, so that processes with the file open see it. */
static void mend(uint64_t magic, size_t bytes)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	char *content = calloc(1, bytes);

	CHECK(fd >= 0 && content);
	memcpy(content, &magic, sizeof magic);
	CHECK(ftruncate(fd, (off_t)bytes) == 0 && pwrite(fd, content, bytes, 0) == (ssize_t)bytes);
	close(fd);
	free(content);
}

static void scribble(unsigned char byte, size_t bytes)
{
	char content[65536];
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	memset(content, byte, sizeof content);
	CHECK(fd >= 0 && write(fd, content, bytes) == (ssize_t)bytes);
	close(fd);
}

static struct aq_node_page opened(uint64_t magic)
{
	struct aq_node_page page;

	aq_node_page_open(&page, path, magic);
	CHECK(page.magic && page.writable && page.fd >= 0 && !page.due_ns);
	return page;
}

static struct aq_turns_party party(uint64_t owner)
{
	return (struct aq_turns_party){ .owner = owner, .demand_bytes = 10 * GIB, .capacity_bytes = 16 * GIB };
}

/* One of the containers that use the pages, launch after launch, until it is killed. */
static pid_t worker(unsigned index, uint64_t magic)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid)
		return pid;
	struct aq_node_page page = opened(magic);
	struct aq_priority_own own = { 0 };
	struct aq_turns_party asks = party(100 + index);
	for (;;) {
		if (magic == AQ_TURNS_MAGIC)
			aq_neighbours_turn(&page, LINE, &asks, now_ns());
		else if (index % 2)
			aq_neighbours_announce(&page, LINE, &own, now_ns(), MS);
		else
			aq_neighbours_percent(&page, LINE, now_ns(), 40);
	}
}

static void damaged_page_kills_no_process(uint64_t magic, size_t bytes)
{
	pid_t workers[WORKERS];
	uint32_t random = 7;
	int status;

	mend(magic, bytes);
	for (unsigned i = 0; i < WORKERS; i++)
		workers[i] = worker(i, magic);
	for (int64_t end = now_ns() + TORMENT_NS; now_ns() < end;) {
		CHECK(truncate(path, support_random(&random) % bytes) == 0);
		CHECK(truncate(path, 0) == 0);
		scribble((unsigned char)support_random(&random), bytes);
		mend(magic, bytes);
	}
	for (unsigned i = 0; i < WORKERS; i++) {
		CHECK(waitpid(workers[i], &status, WNOHANG) == 0); /* it goes on */
		kill(workers[i], SIGKILL);
		CHECK(waitpid(workers[i], &status, 0) == workers[i]);
	}
}

static void priority_stops_with_the_page_and_returns_after_repair(void)
{
	struct aq_priority_own own = { 0 };
	int64_t now = now_ns();

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page high = opened(AQ_PRIORITY_MAGIC), low = opened(AQ_PRIORITY_MAGIC);
	aq_neighbours_announce(&high, LINE, &own, now, 100 * MS);
	CHECK(aq_neighbours_percent(&low, LINE, now, 40) == AQ_PRIORITY_TRICKLE_PERCENT);
	CHECK(aq_neighbours_percent(&low, LINE + 1, now, 40) == 40);
	CHECK(truncate(path, 0) == 0);
	CHECK(aq_neighbours_percent(&low, LINE, now, 40) == 40);
	aq_neighbours_announce(&high, LINE, &own, now, MS);
	struct aq_node_page late = opened(AQ_PRIORITY_MAGIC); /* a container that starts now */
	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	CHECK(aq_neighbours_percent(&low, LINE, now, 40) == 40);
	aq_neighbours_announce(&high, LINE, &own, now, MS);
	CHECK(aq_neighbours_percent(&low, LINE, now + 90 * MS, 40) == AQ_PRIORITY_TRICKLE_PERCENT); /* with what it had launched before */
	CHECK(aq_neighbours_percent(&late, LINE, now + 90 * MS, 40) == AQ_PRIORITY_TRICKLE_PERCENT);
	aq_node_page_close(&high);
	aq_node_page_close(&low);
	aq_node_page_close(&late);
}

static uint64_t turn_on_page(struct aq_node_page *page)
{
	struct aq_turns_line line;

	CHECK(aq_node_page_read(page, sizeof line * LINE, &line, sizeof line));
	return line.turn;
}

static void time_slot_has_one_holder_and_is_lost_with_the_page(void)
{
	struct aq_turns_party one = party(1), other = party(2);
	int64_t now = now_ns();

	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	struct aq_node_page page = opened(AQ_TURNS_MAGIC);
	CHECK(aq_neighbours_turn(&page, LINE, &one, now).may_run); /* alone */
	CHECK(turn_on_page(&page) == 0);
	bool other_runs = aq_neighbours_turn(&page, LINE, &other, now + MS).may_run;
	CHECK(aq_neighbours_turn(&page, LINE, &one, now + 2 * MS).may_run != other_runs);
	CHECK(turn_on_page(&page) != 0);
	CHECK(truncate(path, 100) == 0);
	CHECK(aq_neighbours_turn(&page, LINE, &one, now + 3 * MS).may_run && aq_neighbours_turn(&page, LINE, &other, now + 3 * MS).may_run);
	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	other_runs = aq_neighbours_turn(&page, LINE, &other, now + 4 * MS).may_run;
	CHECK(other_runs); /* no other is known yet */
	bool one_runs = aq_neighbours_turn(&page, LINE, &one, now + 5 * MS).may_run;
	CHECK(aq_neighbours_turn(&page, LINE, &other, now + 6 * MS).may_run != one_runs);
	aq_node_page_close(&page);
}

/* Two that took a time slot at the same moment: each sees at the next query what the other wrote last. */
static void last_writer_has_the_time_slot(void)
{
	struct aq_turns_party one = party(1), other = party(2);
	struct aq_turns_line line;
	int64_t now = now_ns();

	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	struct aq_node_page page = opened(AQ_TURNS_MAGIC);
	aq_neighbours_turn(&page, LINE, &one, now);
	CHECK(aq_node_page_read(&page, sizeof line * LINE, &line, sizeof line));
	aq_turns_query(&line, &other, now); /* sees the line as it was … */
	CHECK(line.turn);
	aq_neighbours_turn(&page, LINE, &other, now);
	CHECK(aq_node_page_write(&page, sizeof line * LINE, &line.turn, sizeof line.turn)); /* … and writes over what came in between */
	bool one_runs = aq_neighbours_turn(&page, LINE, &one, now + MS).may_run;
	CHECK(aq_neighbours_turn(&page, LINE, &other, now + MS).may_run != one_runs);
	aq_node_page_close(&page);
}

/* Each time slot has another number, and memory is prefetched when the number changes. A slot that could not be written must have no
 * number. */
static void time_slot_that_cannot_be_written_is_not_taken(void)
{
	struct aq_turns_party one = party(1), other = party(2);
	int64_t now = now_ns();

	mend(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	struct aq_node_page page = opened(AQ_TURNS_MAGIC);
	CHECK(aq_neighbours_turn(&page, LINE, &other, now).may_run);
	atomic_store(&page.settled_ns, INT64_MAX); /* as after slow writes */
	for (unsigned i = 0; i < 3; i++) {
		struct aq_turns_reply answer = aq_neighbours_turn(&page, LINE, &one, now + i * MS);
		CHECK(answer.may_run && answer.turn == 0);
	}
	CHECK(turn_on_page(&page) == 0);
	atomic_store(&page.settled_ns, 0);
	struct aq_turns_reply taken = aq_neighbours_turn(&page, LINE, &one, now + 30 * MS);
	if (!taken.may_run) /* the other is next, and does not come */
		taken = aq_neighbours_turn(&page, LINE, &one, now + 60 * MS);
	CHECK(taken.may_run && taken.turn && taken.turn == turn_on_page(&page));
	CHECK(!aq_neighbours_turn(&page, LINE, &other, now + 61 * MS).may_run);
	atomic_store(&page.settled_ns, INT64_MAX);
	struct aq_turns_reply unseen = aq_neighbours_turn(&page, LINE, &other, now + 90 * MS); /* would wait in a line that it is not in */
	CHECK(unseen.may_run && unseen.turn == 0 && turn_on_page(&page) == taken.turn);
	aq_node_page_close(&page);
}

/* A program that closes unknown descriptors, and opens a file of its own. */
static void other_file_under_the_same_descriptor_is_not_touched(void)
{
	struct aq_priority_own own = { 0 };
	char own_path[sizeof path + 8], content[8192];

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	close(page.fd);
	snprintf(own_path, sizeof own_path, "%s.own", path);
	int fd = open(own_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(fd == page.fd && ftruncate(fd, 4096) == 0);
	errno = EDOM;
	aq_neighbours_announce(&page, LINE, &own, now_ns(), MS);
	CHECK(aq_neighbours_percent(&page, LINE, now_ns(), 40) == 40);
	aq_node_page_close(&page);
	CHECK(errno == EDOM);
	CHECK(pread(fd, content, sizeof content, 0) == 4096);
	for (unsigned i = 0; i < 4096; i++)
		CHECK(content[i] == 0);
	close(fd);
	unlink(own_path);
}

static void program_without_file_writes_is_not_killed(void)
{
	struct rlimit none = { 0, 0 };
	struct aq_priority_own own = { 0 };
	int status;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
		if (setrlimit(RLIMIT_FSIZE, &none))
			_exit(1);
		aq_neighbours_announce(&page, LINE, &own, now_ns(), MS);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Another's endless write would hold up every launch; so one that took long is made up for. */
static void writing_takes_a_small_part_of_the_time(void)
{
	int64_t word = 0;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	atomic_store(&page.settled_ns, now_ns() + 60000 * MS); /* as after slow writes of 3 s together */
	CHECK(!aq_node_page_write(&page, 64, &word, sizeof word));
	atomic_store(&page.settled_ns, now_ns()); /* the time has passed */
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	aq_node_page_close(&page);
}

static int64_t silent_ns(struct aq_node_page *page, int64_t since_ns)
{
	return atomic_load(&page->settled_ns) - since_ns;
}

/* A thread that lost its processor for 30 ms in the middle of a write: it could not report its high priority for 0.6 s. */
static void one_slow_write_is_excused_and_counted_with_the_next(void)
{
	int64_t word = 0, begin = now_ns() - 100 * MS;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	aq_node_page_took(&page, begin, begin + 30 * MS);
	CHECK(silent_ns(&page, begin + 30 * MS) <= 0);
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	aq_node_page_close(&page);

	page = opened(AQ_PRIORITY_MAGIC);
	aq_node_page_took(&page, begin, begin + 30 * MS);
	aq_node_page_took(&page, begin + 40 * MS, begin + 40 * MS + 2000); /* a quick one in between is no excuse */
	CHECK(silent_ns(&page, begin + 40 * MS) < MS);
	aq_node_page_took(&page, begin + 50 * MS, begin + 60 * MS);
	CHECK(silent_ns(&page, begin) >= 20 * (30 + 10) * MS && silent_ns(&page, begin) < 20 * (30 + 11) * MS);
	CHECK(!aq_node_page_write(&page, 64, &word, sizeof word));
	int64_t later = begin + 1000 * MS; /* made up for: again one is free */
	aq_node_page_took(&page, later, later + 30 * MS);
	CHECK(silent_ns(&page, later + 30 * MS) <= 0);
	aq_node_page_close(&page);
}

/* A tenant that holds the file for 10 ms of every 11 lets a quick write through between two slow ones. */
static void no_pattern_of_slow_writes_takes_more_than_a_twentieth(void)
{
	int64_t spent = 0, now = 1000 * MS, begin = now, end = now + 60000 * MS;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	struct aq_node_page page = opened(AQ_PRIORITY_MAGIC);
	while (now < end) {
		int64_t in_turn = (now - begin) % (11 * MS), took = in_turn < 10 * MS ? 10 * MS - in_turn : 2000;

		if (atomic_load(&page.settled_ns) > now + MS) {
			now += 100000;
			continue;
		}
		aq_node_page_took(&page, now, now + took);
		now += took;
		spent += took;
	}
	CHECK(spent * 20 <= end - begin + 2 * 20 * 10 * MS); /* and the last ones are still to be made up for */
	CHECK(spent * 40 > end - begin);
	aq_node_page_close(&page);
}

/* A child that holds a lease on the page, until it is killed; it asks for no end of it. */
static pid_t leaseholder(int kind)
{
	int ready[2];
	char byte;

	CHECK(pipe(ready) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		signal(SIGIO, SIG_IGN);
		_exit(fd < 0 || fcntl(fd, F_SETLEASE, kind) || write(ready[1], "", 1) != 1 || pause());
	}
	close(ready[1]);
	bool holds = read(ready[0], &byte, 1) == 1;
	close(ready[0]);
	if (holds)
		return pid;
	CHECK(waitpid(pid, NULL, 0) == pid);
	return 0;
}

/* The lease of another tenant delays a page for as long as it lasts, and no open waits for it. */
static void page_with_a_lease_is_used_once_the_lease_ends(int kind)
{
	struct aq_node_page page;
	int64_t word = 7, found = 0;

	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	pid_t pid = leaseholder(kind);
	if (!pid) {
		printf("no lease can be held here: the page was not tried with one\n");
		return;
	}
	int64_t begin = now_ns();
	aq_node_page_open(&page, path, AQ_PRIORITY_MAGIC);
	CHECK(now_ns() - begin < 1000 * MS);
	CHECK(page.magic && page.writable && page.due_ns);
	CHECK(aq_node_page_read(&page, 64, &found, sizeof found) == (kind == F_RDLCK)); /* such a lease lets others read */
	CHECK(!aq_node_page_write(&page, 64, &word, sizeof word));
	CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
	atomic_store(&page.due_ns, now_ns() - 1); /* a second has passed */
	CHECK(aq_node_page_read(&page, 64, &found, sizeof found) && !page.due_ns);
	CHECK(aq_node_page_write(&page, 64, &word, sizeof word));
	CHECK(aq_node_page_read(&page, 64, &found, sizeof found) && found == word);
	aq_node_page_close(&page);
}

/* What the agent does: while a page is open for writing, it can have no lease of either kind. */
static void page_that_is_held_open_can_have_no_lease(void)
{
	mend(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	int fd = open(path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0 && !leaseholder(F_RDLCK) && !leaseholder(F_WRLCK));
	close(fd);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && !leaseholder(F_WRLCK));
	close(fd);
}

int main(void)
{
	snprintf(path, sizeof path, "%s/page", support_directory());
	damaged_page_kills_no_process(AQ_PRIORITY_MAGIC, sizeof(struct aq_priority_page));
	damaged_page_kills_no_process(AQ_TURNS_MAGIC, sizeof(struct aq_turns_page));
	priority_stops_with_the_page_and_returns_after_repair();
	time_slot_has_one_holder_and_is_lost_with_the_page();
	last_writer_has_the_time_slot();
	time_slot_that_cannot_be_written_is_not_taken();
	other_file_under_the_same_descriptor_is_not_touched();
	program_without_file_writes_is_not_killed();
	writing_takes_a_small_part_of_the_time();
	one_slow_write_is_excused_and_counted_with_the_next();
	no_pattern_of_slow_writes_takes_more_than_a_twentieth();
	page_with_a_lease_is_used_once_the_lease_ends(F_RDLCK);
	page_with_a_lease_is_used_once_the_lease_ends(F_WRLCK);
	page_that_is_held_open_can_have_no_lease();
	unlink(path);
	support_remove();
	return 0;
}

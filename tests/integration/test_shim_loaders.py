# SPDX-License-Identifier: Apache-2.0
"""Hostile loaders: programs that look symbols up, start programs and replace functions in every way there is keep working with the shim.

What a lookup answers for each driver function is in test_shim_abi.py, the client's six routes to the driver in test_shim_lookup.py.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aliquot import contract
from tests.fakes.container import CLIENT, LIBRARY_DIR, MIB, Container, Node

LIMIT_MIB = 2048
CONTEXT_MIB = 530
FILLED = (LIMIT_MIB - CONTEXT_MIB) * MIB
PROGRAM = "from tests.fakes.cuda import *\nimport ctypes, os, sys\n"


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture(params=["front", "preload"])
def container(request, node) -> Container:
    return node.container(LIMIT_MIB, interposition=request.param)


@pytest.fixture
def preload_container(node) -> Container:
    return node.container(LIMIT_MIB, interposition="preload")


def compile_c(directory, name, source, *flags):
    path = directory / name
    path.with_suffix(".c").write_text(source)
    subprocess.run(["cc", "-D_GNU_SOURCE", "-O1", "-o", path, path.with_suffix(".c"), *flags, "-ldl", "-pthread"], check=True)
    return path


def with_preloads(container: Container, *libraries) -> dict[str, str]:
    own = container.environment().get("LD_PRELOAD")
    return {"LD_PRELOAD": ":".join([*(str(library) for library in libraries), *([own] if own else [])])}


FILL_C = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
/* Fills the container's limit with a driver found by the lookup given, and says how much that was. */
static void fill(void *(*find)(const char *))
{
    int (*init)(unsigned) = (int (*)(unsigned))find("cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))find("cuDevicePrimaryCtxRetain");
    int (*use)(void *) = (int (*)(void *))find("cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find("cuMemAlloc_v2");
    void *context = NULL;
    uint64_t address;
    size_t held = 0;
    if (!init || !retain || !use || !allocate || init(0) || retain(&context, 0) || use(context))
        exit(1);
    for (size_t step = 256u << 20; step; step /= 2)
        while (allocate(&address, step) == 0)
            held += step;
    printf("{\"held\": %zu}\n", held);
    fflush(stdout);
}
"""

# --- programs with functions of our names, and lookups of all kinds ----------------------------------------------------

CROWDED = (
    FILL_C
    + r"""
/* Names that libraries like to use, exported, each fatal when somebody else calls it. */
#define TRAP(name) __attribute__((visibility("default"))) void name(void) { abort(); }
TRAP(log_error) TRAP(aq_log) TRAP(init) TRAP(lookup) TRAP(resolve) TRAP(hash) TRAP(table) TRAP(map) TRAP(limit) TRAP(limits) TRAP(region)
TRAP(driver) TRAP(real_dlsym) TRAP(my_dlsym) TRAP(__real_dlsym) TRAP(_dlsym) TRAP(aq_decide) TRAP(aq_start) TRAP(aq_cuda_bind)
TRAP(aq_object_find) TRAP(aq_limits_map) TRAP(aq_region_map) TRAP(missing) TRAP(attach) TRAP(prepare) TRAP(answer)
int errors, state, mode, count, pacers, payers, names;
static void *by_handle(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
int main(void) { fill(by_handle); return 0; }
"""
)


TOOL_C = r"""
#include <dlfcn.h>
#include <stddef.h>
/* A profiler: the driver loads it inside cuInit. */
int InitializeInjection(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*total)(size_t *, int) = (int (*)(size_t *, int))dlsym(driver, "cuDeviceTotalMem_v2");
    size_t bytes = 0;

    return init(0) || total(&bytes, 0) || !bytes;
}
"""


def test_a_tool_that_the_driver_loads_inside_cuinit_may_call_the_driver(container, tmp_path):
    tool = compile_c(tmp_path, "tool.so", TOOL_C, "-shared", "-fPIC")
    answer = container.python(PROGRAM + "start()\ntell(free=info()[0])", env={"CUDA_INJECTION64_PATH": str(tool)})
    assert answer.status == 0, answer
    assert answer.last == {"free": FILLED}


LATE_C = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <unistd.h>
/* A library that uses the GPU as it is loaded, when another thread has begun to. */
__attribute__((constructor)) static void begin(void)
{
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuDevicePrimaryCtxRetain");
    void *context;

    usleep(300000);
    retain(&context, 0);
}
"""

LOADS_LATE_C = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static void *load(void *path) { return dlopen(path, RTLD_NOW); }
int main(int argc, char **argv)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context, *loaded;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    pthread_t thread;

    alarm(30);
    if (argc != 2 || init(0) || pthread_create(&thread, NULL, load, argv[1]))
        return 1;
    usleep(100000);
    int result = retain(&context, 0);
    pthread_join(thread, &loaded);
    printf("{\"retained\": %d, \"loaded\": %d}\n", result, loaded != NULL);
    return 0;
}
"""


def test_library_may_use_gpu_while_loading_and_another_thread_starts(container, tmp_path):
    """The loader's lock is held meanwhile.

    The shim needs it to open NVML, which reports what a context costs that has not been measured.
    """
    library = compile_c(tmp_path, "late.so", LATE_C, "-shared", "-fPIC")
    answer = container.run([compile_c(tmp_path, "loads_late", LOADS_LATE_C), library])
    assert answer.status == 0, answer
    assert answer.last == {"retained": 0, "loaded": 1}


def test_a_program_that_exports_common_names_keeps_them_to_itself(container, tmp_path):
    program = compile_c(tmp_path, "crowded", CROWDED, "-rdynamic")
    assert container.run([program]).last == {"held": FILLED}


MALLOC = r"""
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
/* As allocators that wrap libc's do: looked up by RTLD_NEXT at the first use, and again. */
static void *(*next)(size_t);
static _Atomic unsigned long calls;
static _Atomic int different;
static __thread int looking;
static char early[65536];
static _Atomic size_t early_used;
void *malloc(size_t bytes)
{
    calls++;
    if (!next && !looking) {
        looking = 1;
        next = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
        different |= dlsym(RTLD_NEXT, "malloc") != (void *)next || (void *)next == (void *)malloc;
        looking = 0;
    }
    return next ? next(bytes) : early + atomic_fetch_add(&early_used, (bytes + 63) & ~(size_t)63);
}
unsigned long malloc_calls(void) { return calls; }
int malloc_wrong(void) { return different; }
"""


def test_allocator_wrapping_libc_by_rtld_next_works_before_and_after_shim(container, tmp_path):
    library = compile_c(tmp_path, "libwrap.so", MALLOC, "-shared", "-fPIC")
    script = """
library = ctypes.CDLL(None)
library.malloc_calls.restype = ctypes.c_ulong
start()
tell(wrong=library.malloc_wrong(), called=library.malloc_calls() > 100, refused=alloc(3000 * MIB)[0], given=alloc(MIB)[0])
"""
    for order in orders(container, library):
        answer = container.python(PROGRAM + script, env={"LD_PRELOAD": order})
        assert answer.status == 0, answer.stderr
        assert answer.last == {"wrong": 0, "called": True, "refused": 2, "given": 0}


def orders(container: Container, library: Path) -> list[str]:
    """The values of LD_PRELOAD that put a library together with the shim, before and behind it where the shim is preloaded too."""
    own = container.environment().get("LD_PRELOAD")
    return [str(library)] if own is None else [f"{library}:{own}", f"{own}:{library}"]


def test_a_program_on_jemalloc_is_limited(container):
    library = next(Path("/usr/lib").glob("*/libjemalloc.so.2"), None)
    if library is None:
        pytest.skip("no libjemalloc.so.2 (Debian's package libjemalloc2)")
    script = f"""
arenas, size = ctypes.c_uint(0), ctypes.c_size_t(4)
asked = ctypes.CDLL(None).mallctl(b"arenas.narenas", ctypes.byref(arenas), ctypes.byref(size), None, 0)
start()
pieces = [alloc(MIB)[0] for _ in range({LIMIT_MIB})]
tell(asked=asked, arenas=arenas.value, held=pieces.count(0), refused=set(pieces) == {{0, 2}})
"""
    for order in orders(container, library):
        reported = container.python(PROGRAM + script, env={"LD_PRELOAD": order})
        assert reported.status == 0, reported.stderr
        assert reported.last | {"arenas": 0} == {"asked": 0, "arenas": 0, "held": LIMIT_MIB - CONTEXT_MIB, "refused": True}
        assert reported.last["arenas"] > 0


DEFAULT_USER = (
    FILL_C
    + r"""
static void *by_default(const char *name) { return dlsym(RTLD_DEFAULT, name); }
int main(void)
{
    int before = dlsym(RTLD_DEFAULT, "cuInit") != NULL;
    if (before || !dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL))
        return 2;
    fill(by_default);
    return 0;
}
"""
)


def test_rtld_default_finds_the_driver_only_once_it_is_there(container, tmp_path):
    assert container.run([compile_c(tmp_path, "default", DEFAULT_USER)]).last == {"held": FILLED}


@pytest.mark.parametrize("flags", ["RTLD_LAZY | RTLD_LOCAL", "RTLD_NOW | RTLD_DEEPBIND", "RTLD_NOW | RTLD_NODELETE | RTLD_GLOBAL"])
def test_the_driver_may_be_opened_with_any_flags(container, tmp_path, flags):
    source = (
        FILL_C
        + f"""
static void *handle;
static void *by_handle(const char *name) {{ return dlsym(handle, name); }}
int main(void) {{ handle = dlopen("libcuda.so.1", {flags}); fill(by_handle); return 0; }}
"""
    )
    assert container.run([compile_c(tmp_path, "flags", source)]).last == {"held": FILLED}


def test_a_second_namespace_has_the_same_limit(container, tmp_path):
    """Both namespaces in one process: the preload is not in the second, so there it is the lookup that holds it."""
    source = (
        FILL_C
        + r"""
static void *handle;
static void *by_handle(const char *name) { return dlsym(handle, name); }
int main(void) { handle = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW); fill(by_handle); return 0; }
"""
    )
    assert container.run([compile_c(tmp_path, "namespace", source)]).last == {"held": FILLED}


def test_closing_and_opening_the_driver_again_keeps_what_is_counted(container):
    script = """
import _ctypes
start()
alloc(100 * MIB)
first = info()
library = ctypes.CDLL("libcuda.so.1")
for _ in range(20):
    _ctypes.dlclose(library._handle)
    library = ctypes.CDLL("libcuda.so.1")
tell(same=info() == first, refused=alloc(3000 * MIB)[0])
"""
    assert container.python(PROGRAM + script).last == {"same": True, "refused": 2}


def test_lookup_of_missing_symbol_names_it_in_dlerror_and_takes_no_slot(preload_container, tmp_path):
    source = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
int main(void)
{
    void *self = dlopen(NULL, RTLD_NOW);
    int found = dlsym(self, "curl_easy_init") != NULL || dlsym(RTLD_DEFAULT, "curl_easy_init") != NULL;
    const char *why = dlerror();
    printf("{\"found\": %d, \"said\": %d}\n", found, why && strstr(why, "curl_easy_init") != NULL);
    return 0;
}
"""
    assert preload_container.run([compile_c(tmp_path, "curl", source)]).last == {"found": 0, "said": 1}
    assert preload_container.snapshot().slots == ()


def test_threads_that_look_up_at_once_all_get_the_wrapper(container, tmp_path):
    source = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
static pthread_barrier_t start;
static _Atomic int wrong;
static void *_Atomic first;
static void *look(void *unused)
{
    pthread_barrier_wait(&start);
    void *handle = dlopen("libcuda.so.1", RTLD_NOW), *none = NULL;
    for (int i = 0; i < 200; i++) {
        void *found = dlsym(handle, "cuMemAlloc_v2");
        if (!atomic_compare_exchange_strong(&first, &none, found) && none != found) wrong++;
        wrong += dlsym(RTLD_DEFAULT, "qsort") == NULL;
    }
    return unused;
}
int main(void)
{
    pthread_t threads[16];
    pthread_barrier_init(&start, NULL, 16);
    for (int i = 0; i < 16; i++) pthread_create(&threads[i], NULL, look, NULL);
    for (int i = 0; i < 16; i++) pthread_join(threads[i], NULL);
    printf("{\"wrong\": %d, \"found\": %d}\n", wrong, first != NULL);
    return 0;
}
"""
    assert container.run([compile_c(tmp_path, "racing", source)]).last == {"wrong": 0, "found": 1}


# --- other run-times --------------------------------------------------------------------------------------------------


def test_a_program_under_address_sanitizer_runs_and_is_limited(container, tmp_path):
    """ASan wants to be first, replaces malloc and dlopen's friends, and looks up what it replaces by RTLD_NEXT."""
    found = subprocess.run(["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("this compiler has no AddressSanitizer run-time")
    source = (
        FILL_C
        + r"""
static void *by_handle(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
int main(void) { fill(by_handle); return 0; }
"""
    )
    program = compile_c(tmp_path, "sanitized", source, "-fsanitize=address", "-g")
    real = Path(found).resolve()
    answer = container.run([program], {**with_preloads(container, real), "ASAN_OPTIONS": "detect_leaks=0"})
    assert "ERROR: AddressSanitizer" not in answer.stderr
    assert answer.last == {"held": FILLED}


@pytest.fixture(scope="module")
def go_program(build_dir, tmp_path_factory):
    """Fills its container from cgo. The first build compiles Go's runtime too, for minutes on a busy machine; the cache keeps it."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("no Go tool chain")
    directory = tmp_path_factory.mktemp("go")
    body = FILL_C + 'static void *by_handle(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }'
    (directory / "main.go").write_text(
        f"package main\n/*\n#cgo LDFLAGS: -ldl\n{body.replace('/* Fills', '// Fills').replace('that was. */', 'that was.')}\n"
        "static void run(void) { fill(by_handle); }\n*/\n"
        'import "C"\nimport "runtime"\n\n'
        "func main() {\n\truntime.LockOSThread()\n\tdone := make(chan bool)\n"
        "\tgo func() { runtime.GC(); done <- true }()\n\tC.run()\n\t<-done\n}\n"
    )
    (directory / "go.mod").write_text("module fill\n\ngo 1.16\n")
    env = {**os.environ, "GOCACHE": str(build_dir / "go-cache"), "GOFLAGS": "-mod=mod", "CGO_ENABLED": "1", "GOTOOLCHAIN": "local"}
    subprocess.run([go, "build", "-o", directory / "fill", "."], cwd=directory, env=env, check=True, capture_output=True, timeout=290)
    return directory / "fill"


@pytest.mark.timeout(300)
def test_a_go_program_with_cgo_is_limited(container, go_program):
    assert container.run([go_program]).last == {"held": FILLED}


JAVA = """
public class Fill {
    static native void fill();
    public static void main(String[] arguments) throws Exception {
        System.load(arguments[0]);
        Thread thread = new Thread(Fill::fill);
        System.gc();
        thread.start();
        thread.join();
    }
}
"""


def test_a_java_program_with_jni_is_limited(container, tmp_path):
    javac, java = shutil.which("javac"), shutil.which("java")
    if javac is None or java is None:
        pytest.skip("no Java development kit")
    (tmp_path / "Fill.java").write_text(JAVA)
    subprocess.run([javac, "-d", tmp_path, tmp_path / "Fill.java"], check=True, timeout=110)
    source = (
        FILL_C
        + r"""
static void *by_handle(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
void Java_Fill_fill(void *environment, void *class) { (void)environment; (void)class; fill(by_handle); }
"""
    )
    library = compile_c(tmp_path, "libfill.so", source, "-shared", "-fPIC")
    answer = container.run([java, "-Xshare:auto", "-Xmx64m", "-cp", tmp_path, "Fill", library])
    assert answer.last == {"held": FILLED}, answer.stderr


# --- ways of starting a program -----------------------------------------------------------------------------------------


def test_a_static_program_runs_as_without_the_shim(container, tmp_path):
    source = '#include <stdio.h>\nint main(void) { puts("{\\"ran\\": 1}"); return 0; }\n'
    try:
        program = compile_c(tmp_path, "static", source, "-static")
    except subprocess.CalledProcessError:
        pytest.skip("no static C library")
    assert container.run([program]).last == {"ran": 1}


def test_a_cleared_environment_does_not_get_past_the_front(node):
    """Without LD_PRELOAD, LD_LIBRARY_PATH and all else; the library is named by its path, as ld.so.cache would."""
    container = node.container(LIMIT_MIB)
    path = container.root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    kept = [f"{name}={value}" for name, value in container.environment().items() if name.startswith("ALIQUOT_SIM")]
    script = f"""
import ctypes
library = ctypes.CDLL({str(path)!r})
context, address = ctypes.c_void_p(), ctypes.c_uint64()
library.cuInit(0); library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0); library.cuCtxSetCurrent(context)
refused = library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t({LIMIT_MIB} << 20))
print('{{"refused": %d, "given": %d}}' % (refused, library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 20))))
"""
    assert container.run(["env", "-i", *kept, sys.executable, "-c", script]).last == {"refused": 2, "given": 0}


SPAWNER = r"""
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <dlfcn.h>
#include <stdint.h>
extern char **environ;
static int wait_for(pid_t child) { int status = -1; waitpid(child, &status, 0); return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }
int main(int argc, char **argv)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*use)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(driver, "cuMemAlloc_v2");
    uint64_t address;
    char *command[] = { argv[2], "info", NULL };
    int answers[3] = { -1, -1, -1 };
    (void)argc;
    if (init(0) || retain(&context, 0) || use(context) || allocate(&address, 100u << 20))
        return 3;
    if (!strcmp(argv[1], "spawn")) {
        pid_t child;
        if (posix_spawn(&child, argv[2], NULL, NULL, command, environ) == 0)
            answers[0] = wait_for(child);
    } else if (!strcmp(argv[1], "vfork")) {
        pid_t child = vfork();
        if (child == 0) { execv(argv[2], command); _exit(127); }
        answers[0] = wait_for(child);
        child = vfork(); /* one whose exec fails must leave the parent as it was */
        if (child == 0) { execv("/nonexistent", command); _exit(127); }
        answers[1] = wait_for(child);
    } else { /* exec over ourselves, what is open being closed or not as its owner said */
        for (int fd = 3; fd < 64; fd++) {
            int flags = fcntl(fd, F_GETFD);
            if (flags >= 0 && !(flags & FD_CLOEXEC)) { fprintf(stderr, "file %d would leak\n", fd); return 4; }
        }
        fflush(stdout);
        execv(argv[2], command);
        return 5;
    }
    answers[2] = allocate(&address, 100u << 20);
    printf("{\"child\": %d, \"failed\": %d, \"after\": %d}\n", answers[0], answers[1], answers[2]);
    return 0;
}
"""


@pytest.mark.parametrize(
    ("how", "want"), [("spawn", {"child": 0, "failed": -1, "after": 0}), ("vfork", {"child": 0, "failed": 127, "after": 0})]
)
def test_spawned_child_counts_for_itself_and_parent_continues(container, tmp_path, how, want):
    program = compile_c(tmp_path, "spawner", SPAWNER)
    answer = container.run([program, how, container.build / "bin/aliquot-cuda-client"])
    assert answer.status == 0, answer.stderr
    *_, child, own = answer.events
    assert own == want
    assert child["free_bytes"] == (LIMIT_MIB - 100 - 2 * CONTEXT_MIB) * MIB


def test_exec_closes_what_the_shim_opened_and_frees_what_the_program_held(container, tmp_path):
    program = compile_c(tmp_path, "spawner", SPAWNER)
    answer = container.run([program, "exec", container.build / "bin/aliquot-cuda-client"])
    assert answer.status == 0, answer.stderr
    assert answer.last["free_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


LIBRARIES = "/usr/lib/x86_64-linux-gnu"
AS_MOUNTED = f"""set -e
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$1/{LIBRARY_DIR}:{LIBRARIES}" {LIBRARIES}
mount -t overlay overlay -o "lowerdir=$1/etc:/etc" /etc
mount -t tmpfs tmpfs /run
mkdir /run/aliquot
mount --bind "$1/run/aliquot" /run/aliquot
shift
exec "$@"
"""
"""Where a runtime puts a container's files; then the command that follows."""


def test_a_setuid_program_of_another_user_is_held(container, build_dir, tmp_path):
    """For such a program the loader takes no library by an environment variable, only from its own directories and /etc/ld.so.preload."""
    etc = container.root / "etc"
    etc.mkdir()
    if container.interposition == "preload":
        (etc / "ld.so.preload").write_text(contract.CONTAINER_PRELOAD)
    mounted = ["unshare", "-m", "sh", "-c", AS_MOUNTED, "sh", container.root]
    tried = subprocess.run([*mounted, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no files can be mounted here: {tried.stderr.strip()}")
    program = Path(shutil.copy(build_dir / CLIENT, tmp_path / "setuid"))
    program.chmod(0o4755)
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(directory.stat().st_mode | 0o011)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", program]
    nothing = {"LD_LIBRARY_PATH": "", "LD_PRELOAD": ""}
    filled = container.run([*mounted, *as_nobody, "fill"], nothing)
    assert filled.status == 0, filled
    assert filled.last["held_bytes"] == FILLED
    assert filled.last["total_bytes"] == LIMIT_MIB * MIB

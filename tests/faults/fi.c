/* A disk that fails on purpose: preloaded, it counts the write-class calls on files whose path holds a text, and fails, tears or kills at the
   nth. Armed from the process itself (fi_arm). The code under test is unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { FAIL_EIO = 1, FAIL_ENOSPC = 2, TEAR = 3, KILL = 4, TEAR_AND_KILL = 5 };

static long calls = 0, at = -1;
static int kind = 0, sticky = 0, fired = 0;
static char wanted[256] = "";

void fi_arm(long nth, int what, int stays, const char *path) {
    calls = 0; at = nth; kind = what; sticky = stays; fired = 0;
    strncpy(wanted, path, sizeof wanted - 1);
}
void fi_mend(void) { at = -1; }
long fi_calls(void) { return calls; }
int fi_fired(void) { return fired; }

static int on_our_file(int fd) {
    char link[64], path[512];
    ssize_t n;
    if (!wanted[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return !strstr(path, "-shm") && strstr(path, wanted) != 0;
}
static int strikes(int fd) {
    if (!on_our_file(fd)) return 0;
    long n = __sync_add_and_fetch(&calls, 1);
    if (at > 0 && (n == at || (sticky && n > at))) { fired++; return kind; }
    return 0;
}
static void die(void) { kill(getpid(), SIGKILL); pause(); }

#define REAL(ret, name, ...) static ret (*real)(__VA_ARGS__) = 0; if (!real) real = dlsym(RTLD_NEXT, name)

static ssize_t written(int fd, const void *buf, size_t n, off_t off, ssize_t (*real)(int, const void *, size_t, off_t)) {
    switch (strikes(fd)) {
    case FAIL_EIO: errno = EIO; return -1;
    case FAIL_ENOSPC: errno = ENOSPC; return -1;
    case TEAR: real(fd, buf, n / 2, off); errno = EIO; return -1;
    case TEAR_AND_KILL: real(fd, buf, n / 2, off); die(); break;
    case KILL: die(); break;
    }
    return real(fd, buf, n, off);
}
ssize_t pwrite64(int fd, const void *buf, size_t n, off_t off) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    return written(fd, buf, n, off, real);
}
ssize_t pwrite(int fd, const void *buf, size_t n, off_t off) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    return written(fd, buf, n, off, real);
}
static int flushed(int fd, int (*real)(int)) {
    int what = strikes(fd);
    if (what >= KILL) die();
    if (what) { errno = what == FAIL_ENOSPC ? ENOSPC : EIO; return -1; }
    return real(fd);
}
int fsync(int fd) { REAL(int, "fsync", int); return flushed(fd, real); }
int fdatasync(int fd) { REAL(int, "fdatasync", int); return flushed(fd, real); }
static int cut(int fd, off_t size, int (*real)(int, off_t)) {
    int what = strikes(fd);
    if (what >= KILL) die();
    if (what) { errno = EIO; return -1; }
    return real(fd, size);
}
int ftruncate64(int fd, off_t size) { REAL(int, "ftruncate64", int, off_t); return cut(fd, size, real); }
int ftruncate(int fd, off_t size) { REAL(int, "ftruncate", int, off_t); return cut(fd, size, real); }

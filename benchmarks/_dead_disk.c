/* Preloaded: reads, writes and syncs of cache files fail with EIO, or never end, once the file $DEAD_DISK_TRIGGER
 * exists. Everything else is passed on. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_dead(int fd)
{
    const char *trigger = getenv("DEAD_DISK_TRIGGER");
    char link[64], path[PATH_MAX];
    if (!trigger || access(trigger, F_OK) != 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strstr(path, "/pegaflow-ssd-") != NULL;
}

static int fail(void)
{
    while (getenv("DEAD_DISK_HANGS"))
        sleep(3600);
    errno = EIO;
    return -1;
}

#define PASS(name, type, ...) \
    static type next; \
    if (!next) \
        next = (type)dlsym(RTLD_NEXT, #name); \
    return next(__VA_ARGS__)

typedef ssize_t (*read_at)(int, void *, size_t, off64_t);
typedef ssize_t (*write_at)(int, const void *, size_t, off64_t);
typedef int (*sync_fd)(int);

ssize_t pread64(int fd, void *bytes, size_t count, off64_t offset)
{
    if (is_dead(fd))
        return fail();
    PASS(pread64, read_at, fd, bytes, count, offset);
}

ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset)
{
    if (is_dead(fd))
        return fail();
    PASS(pwrite64, write_at, fd, bytes, count, offset);
}

int fdatasync(int fd)
{
    if (is_dead(fd))
        return fail();
    PASS(fdatasync, sync_fd, fd);
}

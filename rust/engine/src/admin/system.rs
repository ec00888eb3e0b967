//! Facts about the host that `pegaflow doctor` reports.

use serde::Serialize;

#[derive(Serialize)]
struct Facts {
    page_bytes: u64,
    cpus: usize,
    memlock_bytes: Option<u64>,
    io_uring: String,
}

/// JSON object with page size, usable CPUs, locked-memory limit (`null`: unlimited) and whether io_uring works.
pub fn system_info() -> String {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
    let memlock = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK).ok();
    super::inspect::to_json(&Facts {
        page_bytes: page as u64,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        memlock_bytes: memlock.map(|(soft, _)| soft).filter(|soft| *soft != libc::RLIM_INFINITY),
        io_uring: io_uring(),
    })
}

/// Ask the kernel for a ring and give it back.
fn io_uring() -> String {
    let mut parameters = [0u8; 120];
    // SAFETY: the kernel reads and writes at most the 120 bytes of struct io_uring_params behind the pointer.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1u32, parameters.as_mut_ptr()) };
    if ring < 0 {
        return std::io::Error::last_os_error().to_string();
    }
    // SAFETY: the descriptor was just made for us and nobody else knows it.
    unsafe { libc::close(ring as i32) };
    "ok".into()
}

//! Python binding of the PegaFlow engine: one class per file, conversions only. What each name does is documented in
//! `pegaflow/_native.pyi`.

mod admin;
mod buffer;
mod copier;
mod cuda;
mod directory;
mod error;
mod hash;
mod items;
mod keys;
mod layout;
mod log;
mod namespace;
mod objects;
mod peers;
mod pool;
mod ssd;
mod tier;

#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::admin::{crash_point_arm, crash_points, inspect, list_pools, reap, remove, system_info, verify};
    #[pymodule_export]
    use crate::copier::{CopyDone, HostCopier};
    #[pymodule_export]
    use crate::cuda::CudaCopier;
    #[pymodule_export]
    use crate::directory::{Directory, DirectoryQuery};
    #[pymodule_export]
    use crate::hash::block_hash;
    #[pymodule_export]
    use crate::layout::PyKvLayout;
    #[pymodule_export]
    use crate::namespace::Namespace;
    #[pymodule_export]
    use crate::objects::ObjectStore;
    #[pymodule_export]
    use crate::peers::{Nic, PeerFetch, PeerQuery, PeerServer, Peers};
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::ssd::{ssd_inspect, ssd_remove, ssd_verify};
    #[pymodule_export]
    use crate::tier::Prefetch;

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name in _native.pyi")]
    const build_profile: &str = if cfg!(debug_assertions) { "debug" } else { "release" };
    #[pymodule_export]
    const LAYOUT_VERSION: u32 = pegaflow_engine::names::LAYOUT_VERSION;

    /// `__all__` would have to be kept in the stub as well; everything here is public anyway.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::log::start();
        module.delattr("__all__")
    }
}

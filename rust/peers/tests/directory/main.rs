//! The directory on real servers: what is registered is found, what is lost comes back, and nobody else is ever named.
//! `PEGAFLOW_DIRECTORY_SERVER` names another program than `redis-server`.
#![allow(missing_docs)]

mod blocks;
mod one_server;
mod server;
mod several_servers;
mod talk;

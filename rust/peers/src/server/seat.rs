//! Which process answers for a pool: the one to which the kernel gives the address.

use std::io::ErrorKind as IoErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

use pegaflow_engine::{Error, ErrorKind, ForkGuard, Result};

/// An address that is an explicit one.
pub(crate) fn parse(listen: &str) -> Result<SocketAddr> {
    let address: SocketAddr = listen.parse().map_err(|_| {
        invalid(format!("'{listen}' is no address to listen on: give IP:port, such as 10.0.0.7:7400 or [fd00::7]:7400"))
    })?;
    if address.ip().is_unspecified() {
        return Err(invalid(format!(
            "'{listen}' would serve every network: give the address of the one that peers are on"
        )));
    }
    if address.port() == u16::MAX {
        return Err(invalid("the data plane has the port behind that of peer_listen: choose a lower one"));
    }
    Ok(address)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// Has forked children close a socket, until it is dropped: which has to be before the socket is closed.
pub(crate) struct Guard(ForkGuard);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// A listening socket that forked children close.
pub(crate) struct Listener {
    pub(crate) guard: Guard,
    pub(crate) socket: TcpListener,
}

/// Sockets of both planes.
pub(crate) struct Seat {
    pub(crate) control: Listener,
    pub(crate) data: Option<Listener>,
}

/// Why there is none.
pub(crate) enum NoSeat {
    /// Somebody else has it.
    Taken,
    /// It cannot be had here.
    Failed(Error),
}

impl Seat {
    /// Take the address, and with `with_data` the port behind it; port 0: any two.
    pub(crate) fn take(address: SocketAddr, with_data: bool) -> std::result::Result<Self, NoSeat> {
        let control = listen(address)?;
        let data_port = if address.port() == 0 { 0 } else { address.port() + 1 };
        let data = with_data.then(|| listen(SocketAddr::new(address.ip(), data_port))).transpose()?;
        Ok(Self { control, data })
    }
}

fn listen(address: SocketAddr) -> std::result::Result<Listener, NoSeat> {
    let failed = |error: std::io::Error| match error.kind() {
        IoErrorKind::AddrInUse => NoSeat::Taken,
        IoErrorKind::AddrNotAvailable => NoSeat::Failed(invalid(format!(
            "{} is no address of this host (here: of this container): set pegaflow.peer_listen to one",
            address.ip()
        ))),
        _ => NoSeat::Failed(invalid(format!("cannot listen on {address}: {error}"))),
    };
    let socket = TcpListener::bind(address).map_err(failed)?;
    let guard = ForkGuard::new(socket.as_raw_fd()).ok_or_else(|| {
        NoSeat::Failed(Error::new(ErrorKind::Busy, "this process has too many pools and servers open: close some"))
    })?;
    Ok(Listener { guard: Guard(guard), socket })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_and_names_are_no_addresses_to_listen_on() {
        for wrong in ["0.0.0.0:7400", "[::]:7400", "localhost:7400", "10.0.0.7", "", "10.0.0.7:65535", ":7400"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(parse("127.0.0.1:7400").is_ok());
        assert!(parse("[::1]:7400").is_ok());
    }

    #[test]
    fn of_two_one_has_the_seat_and_it_is_free_after_that_one() {
        let is_free_again = || {
            let Ok(first) = Seat::take(parse("127.0.0.1:0").unwrap(), true) else { panic!("nobody has any port") };
            let address = first.control.socket.local_addr().unwrap();
            assert!(matches!(Seat::take(address, false), Err(NoSeat::Taken)));
            drop(first);
            Seat::take(address, false).is_ok()
        };
        // The kernel may have given the port to somebody else.
        assert!((0..20).any(|_| is_free_again()));
    }

    #[test]
    fn an_address_of_another_host_is_an_error_that_says_so() {
        let taken = Seat::take("192.0.2.1:7400".parse().unwrap(), false);
        assert!(matches!(taken, Err(NoSeat::Failed(error)) if error.to_string().contains("no address of this host")));
    }
}

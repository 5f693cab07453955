//! Sets of networks, as settings name them.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Networks and addresses, separated by commas; may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Networks(Vec<IpNet>);

/// What is neither a network nor an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no network, such as 10.0.0.0/8, and no address")]
pub struct NoNetwork(String);

impl Networks {
    /// Whether the address is in one of them. An IPv4 address that came through IPv6 is that of
    /// IPv4.
    #[must_use]
    pub fn contain(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Networks {
    type Err = NoNetwork;

    fn from_str(text: &str) -> Result<Self, NoNetwork> {
        let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
        let network = |word: &str| {
            let network = word.parse().or_else(|_| word.parse::<IpAddr>().map(IpNet::from));
            network.map_err(|_| NoNetwork(word.to_owned()))
        };
        words.map(network).collect::<Result<_, _>>().map(Self)
    }
}

impl TryFrom<String> for Networks {
    type Error = NoNetwork;

    fn try_from(text: String) -> Result<Self, NoNetwork> {
        text.parse()
    }
}

impl From<Networks> for String {
    fn from(networks: Networks) -> Self {
        networks.to_string()
    }
}

impl fmt::Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, network) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(", ")?;
            }
            network.fmt(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use super::*;

    #[test]
    fn networks_and_addresses_contain_what_they_should() {
        let networks: Networks = "10.0.0.0/8, 192.0.2.7,2001:db8::/32".parse().unwrap();
        let contains = |address: &str| networks.contain(address.parse().unwrap());
        for inside in ["10.255.0.1", "192.0.2.7", "2001:db8::1", "::ffff:10.0.0.1"] {
            assert!(contains(inside), "{inside}");
        }
        for outside in ["11.0.0.1", "192.0.2.8", "2001:db9::1"] {
            assert!(!contains(outside), "{outside}");
        }
        assert_eq!(networks.to_string(), "10.0.0.0/8, 192.0.2.7/32, 2001:db8::/32");
        assert!("".parse::<Networks>().unwrap().is_empty());
    }

    #[test]
    fn what_is_no_network_is_named() {
        for text in ["10.0.0.0/33", "localhost", "10.0.0.0/8 10.0.0.1", "10.0.0.1-10.0.0.9"] {
            let error = text.parse::<Networks>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }
}

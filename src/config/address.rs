//! An address to listen on, or none.

use std::{
    fmt,
    net::{AddrParseError, SocketAddr},
};

use serde::{Deserialize, Serialize};

/// Where to listen; an empty text is nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OptionalAddr(pub Option<SocketAddr>);

impl TryFrom<String> for OptionalAddr {
    type Error = AddrParseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text.is_empty() { Ok(Self(None)) } else { text.parse().map(|addr| Self(Some(addr))) }
    }
}

impl From<OptionalAddr> for String {
    fn from(addr: OptionalAddr) -> Self {
        addr.to_string()
    }
}

impl fmt::Display for OptionalAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(addr) => addr.fmt(f),
            None => Ok(()),
        }
    }
}

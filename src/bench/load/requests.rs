//! The bodies of calls, encoded before the first one is sent.

use prost::bytes::{BufMut as _, Bytes, BytesMut};

use crate::{
    api::pb,
    domain::{BuyerId, OfferKey, RequestId, ReservationId, name_reservation},
};

/// The `request_id` of everybody's first attempt.
const ATTEMPT: &str = "attempt-1";
/// What stands before a message on the wire: a flag, and its length.
const PREFIX: usize = 5;

/// What is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Reserve,
    Release,
}

impl Method {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Reserve => "/seckill.v1.Seckill/Reserve",
            Self::Release => "/seckill.v1.Seckill/Release",
        }
    }
}

/// The calls of many buyers, all of one method.
#[derive(Debug, Clone)]
pub struct Requests {
    /// One after the other, each of the same length.
    bodies: Bytes,
    each: usize,
    pub method: Method,
}

/// Who buys: a name per series and number, all of the same length.
#[must_use]
pub fn buyer(series: &str, nth: usize) -> String {
    format!("{series}-{nth:09}")
}

/// The reservation that this buyer's first attempt wins, if it wins.
#[must_use]
pub fn reservation(offer: &OfferKey, series: &str, nth: usize) -> ReservationId {
    let buyer = BuyerId::new(&buyer(series, nth)).expect("letters, digits and a dash");
    let attempt = RequestId::new(ATTEMPT).expect("letters, a digit and a dash");
    name_reservation(offer, &buyer, Some(&attempt))
}

/// One unit for this buyer; `attempt` is one digit.
#[must_use]
pub fn attempt(offer: &OfferKey, series: &str, nth: usize, attempt: usize) -> pb::ReserveRequest {
    pb::ReserveRequest {
        activity_id: offer.activity_id.to_string(),
        sku_id: offer.sku_id.to_string(),
        user_id: buyer(series, nth),
        quantity: None,
        request_id: format!("attempt-{attempt}"),
    }
}

impl Requests {
    /// The first attempts of the first `count` buyers of a series.
    #[must_use]
    pub fn reserve(offer: &OfferKey, series: &str, count: usize) -> Self {
        let mut request = attempt(offer, series, 0, 1);
        Self::each(Method::Reserve, count, move |nth| {
            request.user_id = buyer(series, nth);
            request.clone()
        })
    }

    /// Releases of what these buyers of a series hold, in this order.
    #[must_use]
    pub fn release(offer: &OfferKey, series: &str, winners: &[usize]) -> Self {
        Self::each(Method::Release, winners.len(), |at| pb::ReleaseRequest {
            activity_id: offer.activity_id.to_string(),
            sku_id: offer.sku_id.to_string(),
            user_id: buyer(series, winners[at]),
            reservation_id: reservation(offer, series, winners[at]).to_string(),
            reason: "bench".to_owned(),
        })
    }

    /// So many messages, which have to be of one length.
    #[must_use]
    pub fn each<M: prost::Message>(
        method: Method,
        count: usize,
        mut message: impl FnMut(usize) -> M,
    ) -> Self {
        let mut bodies = BytesMut::new();
        let mut each = PREFIX;
        for nth in 0..count {
            let message = message(nth);
            let length = message.encoded_len();
            if nth == 0 {
                each = PREFIX + length;
                bodies.reserve(each * count);
            }
            bodies.put_u8(0);
            bodies.put_u32(u32::try_from(length).expect("names are short"));
            message.encode(&mut bodies).expect("the buffer grows");
        }
        assert_eq!(bodies.len(), each * count, "messages of one load have one length");
        Self { bodies: bodies.freeze(), each, method }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.bodies.len() / self.each
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bodies.is_empty()
    }

    pub(super) fn nth(&self, nth: usize) -> Option<Bytes> {
        let begin = nth.checked_mul(self.each)?;
        let end = begin + self.each;
        (end <= self.bodies.len()).then(|| self.bodies.slice(begin..end))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

    use prost::Message as _;

    use super::*;
    use crate::domain::{ActivityId, SkuId};

    #[test]
    fn each_body_is_one_message_of_its_own_buyer() {
        let offer = OfferKey {
            activity_id: ActivityId::new("a").unwrap(),
            sku_id: SkuId::new("s").unwrap(),
        };
        let requests = Requests::reserve(&offer, "b", 12);
        assert_eq!(requests.len(), 12);
        let body = requests.nth(11).unwrap();
        let request = pb::ReserveRequest::decode(&body[PREFIX..]).unwrap();
        assert_eq!(usize::from(body[4]) + PREFIX, body.len());
        assert_eq!((request.user_id.as_str(), request.activity_id.as_str()), ("b-000000011", "a"));
        assert!(requests.nth(12).is_none());
    }
}

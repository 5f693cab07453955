//! The codec of both services: prost, with buffers for small messages.

use std::marker::PhantomData;

use prost::Message;
use tonic::codec::{BufferSettings, Codec};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// tonic's buffers begin at 8 KiB, two per call; a reservation has some 100 bytes, its answer
/// some 200. Larger messages let them grow.
const INITIAL_BYTES: usize = 512;
/// tonic's default: what a stream collects before it hands a frame on.
const YIELD_BYTES: usize = 32 * 1_024;

/// `tonic_prost::ProstCodec` with small buffers; the generated code names it.
#[derive(Debug)]
pub struct SmallBuffers<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for SmallBuffers<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for SmallBuffers<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::new(INITIAL_BYTES, YIELD_BYTES))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::new(INITIAL_BYTES, YIELD_BYTES))
    }
}

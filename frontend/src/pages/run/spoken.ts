// What a screen reader hears of a live run: its progress, every ten seconds at most.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Summary } from "../../types";
import { progressText } from "./page";

const LEAST_MS = 10_000;

export function useSpoken(run: Summary | null): string {
  const [spoken, setSpoken] = useState("");
  const newest = useRef(run);
  newest.current = run;
  useEffect(() => {
    const timer = setInterval(() => newest.current && setSpoken(progressText(newest.current)), LEAST_MS);
    return () => clearInterval(timer);
  }, []);
  return spoken;
}

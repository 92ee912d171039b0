// Notifies listeners of changes, at most once a frame, so that a burst of messages costs one drawing.
import { useLayoutEffect, useState } from "preact/hooks";

export class Topic {
  private readonly listeners = new Set<() => void>();
  private pending = false;
  private last = 0;

  /** `pause` is the least time between two notifications, in milliseconds; 0 is every frame. */
  constructor(private readonly pause = 0) {}

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  notify(): void {
    if (this.pending) return;
    this.pending = true;
    const wait = this.last + this.pause - performance.now();
    if (wait > 0) setTimeout(() => requestAnimationFrame(this.fire), wait);
    else requestAnimationFrame(this.fire);
  }

  private readonly fire = (): void => {
    this.pending = false;
    this.last = performance.now();
    for (const listener of [...this.listeners]) listener();
  };
}

/** Draw a component again whenever the topic is notified; it listens from its first drawing on, so that nothing is missed. */
export function useTopic(topic: Topic): void {
  const [, draw] = useState(0);
  useLayoutEffect(() => topic.listen(() => draw((n) => n + 1)), [topic]);
}
